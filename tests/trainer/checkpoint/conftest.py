"""A copy of the run folder that a test may damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def damaged(run, tmp_path):
    """A copy of the run folder with checkpoints 3 and 6, to be damaged."""
    return Path(shutil.copytree(run.folder, tmp_path / "copy"))
