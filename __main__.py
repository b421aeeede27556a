"""`python -m meshwright` is the command `meshwright`."""

from .trainer.cli import run

run()
