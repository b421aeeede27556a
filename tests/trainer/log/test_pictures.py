"""Drawing needs no backend of matplotlib."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


DRAW = """
import sys, types
from meshwright.trainer.log.metrics import plot_loss
history = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]
plot_loss(history, {}, sys.argv[1])
assert "matplotlib.pyplot" not in sys.modules
import matplotlib, os
if os.environ["MPLBACKEND"] == "TkAgg":  # the others are none
    assert matplotlib.get_backend() == "TkAgg"
from meshwright.trainer.cli import main
words = ["schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--json", "--png"]
assert main([*words, sys.argv[1] + ".png"]) == 0
assert main([*words, "/dev/full"]) == 1
sys.modules["IPython"] = types.ModuleType("IPython")
plot_loss(history, {})  # shown where a notebook can, and never an error
"""


@pytest.mark.parametrize("backend", ["TkAgg", "module://matplotlib_inline.backend_inline", "foo"])
def test_no_backend_is_needed_to_draw(backend, path):
    """A notebook's is not installed elsewhere, and matplotlib itself refuses one that is none."""
    environ = os.environ | {"MPLBACKEND": backend}
    command = [sys.executable, "-c", DRAW, str(path.with_suffix(".png"))]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        0,
        "meshwright: [Errno 28] No space left on device: '/dev/full'\n",
    )
