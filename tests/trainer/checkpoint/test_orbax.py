"""Orbax is given plain paths, whatever the folder is called."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from meshwright.trainer.checkpoint.manifest import find_checkpoints
from meshwright.trainer.checkpoint.orbax import plain_path
from meshwright.trainer.checkpoint.restore import restore, verify_checkpoints
from states import assert_bitwise, checkpoints_in, target_on

ODD_NAMES = ["a[b]", "[", "a*b", "a?b", "a\\b", "gs:", "a b #2", "ä\n", os.fsdecode(b"\xff")]


@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
def test_every_path_that_a_file_system_allows_works(run, tmp_path, name, monkeypatch):
    """Orbax reads patterns and URLs in some, and said nothing when its own files were not found."""
    folder = tmp_path / name / "run"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)  # where no config names it
    links = set(Path(tempfile.gettempdir()).glob("meshwright-*"))
    with checkpoints_in(Path("."), run.config, "checkpoint.keep=1") as checkpoints:
        for step in (3, 6):
            checkpoints.save(step, run.result.state)
            checkpoints.wait()
    assert list(find_checkpoints(folder)) == [6]
    target, _ = target_on(run.config)
    step, restored = restore(folder, target)
    assert step == 6
    assert_bitwise(restored, run.result.state)
    assert all(good for _, good in verify_checkpoints(folder))
    assert set(Path(tempfile.gettempdir()).glob("meshwright-*")) == links


def test_where_no_plain_name_can_be_had_it_is_said_before_training(tmp_path, monkeypatch):
    odd = tmp_path / "t[m]p"
    odd.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(odd))
    with pytest.raises(ValueError, match=r"TMPDIR=.*t\[m\]p"), plain_path(tmp_path / "a[b]"):
        pass
    with plain_path(tmp_path / "ab") as path:
        assert path == tmp_path / "ab"
