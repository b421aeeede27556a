"""`python -m meshwright` is the command `meshwright`."""

import sys

from .trainer.cli import main

sys.exit(main())
