"""Saving: the newest and the best are kept; what the disk refuses is named."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace

import jax
import pytest

from disk import largest_file
from meshwright.trainer.checkpoint.manifest import find_checkpoints
from meshwright.trainer.checkpoint.restore import restore
from meshwright.trainer.checkpoint.save import CheckpointError
from states import assert_bitwise, checkpoints_in, target_on


@pytest.mark.parametrize(
    ("settings", "losses", "kept"),
    [
        (["checkpoint.keep=1"], {}, [10]),
        (["checkpoint.keep=3"], {}, [4, 9, 10]),
        (["checkpoint.keep=1"], {2: 1.0, 4: 3.0, 9: 2.0}, [2, 10]),
        (["checkpoint.keep=1"], {2: math.nan, 4: 3.0, 9: math.inf}, [4, 10]),
        (["checkpoint.keep=2"], {2: 3.0, 4: 1.0, 9: 2.0}, [4, 9, 10]),
        (["checkpoint.keep=2"], {3: 0.1, 9: 2.0}, [9, 10]),
        (["checkpoint.keep=1", "checkpoint.keep_best=false"], {2: 1.0}, [10]),
        (["checkpoint.keep=1", "checkpoint.asynchronous=false"], {4: 1.0}, [4, 10]),
    ],
)
def test_the_newest_are_kept_and_the_best(run, tmp_path, settings, losses, kept):
    state = run.result.state
    with checkpoints_in(tmp_path, run.config, *settings, losses=losses) as checkpoints:
        for step in (2, 4, 9, 10):
            checkpoints.save(step, replace(state, step=state.step + step))
    assert list(find_checkpoints(tmp_path)) == kept
    target, _ = target_on(run.config)
    step, restored = restore(tmp_path, {"step": target.step})
    assert (step, restored["step"].item()) == (10, run.result.state.step.item() + 10)


def test_a_checkpoint_is_a_copy_of_its_moment(run, tmp_path):
    """Donating the state to the next step, right after, does not reach what is still written; and
    leaving waits for that."""
    state = jax.tree.map(lambda leaf: leaf + 0, run.result.state)
    with checkpoints_in(tmp_path, run.config) as checkpoints:
        checkpoints.save(1, state)
        for leaf in jax.tree.leaves(state):
            leaf.delete()
    target, _ = target_on(run.config)
    assert_bitwise(restore(tmp_path, target)[1], run.result.state)


def test_a_step_is_saved_once(run, tmp_path):
    with checkpoints_in(tmp_path, run.config) as checkpoints:
        assert checkpoints.newest is None
        checkpoints.save(1, run.result.state)
        checkpoints.save(1, run.result.state)
        checkpoints.wait()
        assert checkpoints.newest == 1
        checkpoints.save(1, run.result.state)
    with checkpoints_in(tmp_path, run.config) as checkpoints:
        assert checkpoints.newest == 1


# A disk that refuses


def settle(checkpoints):
    """What the loop does after each step, until the save is over."""
    while checkpoints._pending is not None:
        checkpoints.check()


def test_a_full_disk_is_reported_with_the_newest_checkpoint(run, tmp_path):
    with checkpoints_in(tmp_path, run.config) as checkpoints:
        checkpoints.save(1, run.result.state)
        checkpoints.wait()
        with largest_file(100), pytest.raises(CheckpointError) as caught:
            checkpoints.save(2, run.result.state)
            settle(checkpoints)
    assert str(caught.value) == (
        "the checkpoint of step 2 was not saved: File too large; the newest is of step 1"
    )
    assert list(find_checkpoints(tmp_path)) == [1]
    target, _ = target_on(run.config)
    assert_bitwise(restore(tmp_path, target)[1], run.result.state)


def test_where_checkpoints_are_not_required_it_is_said_and_the_next_is_saved(run, tmp_path):
    said = []
    settings = "checkpoint.required=false"
    with checkpoints_in(tmp_path, run.config, settings, said=said) as checkpoints:
        with largest_file(100):
            checkpoints.save(2, run.result.state)
            settle(checkpoints)
        assert said == ["the checkpoint of step 2 was not saved: File too large; none is saved"]
        assert (checkpoints.newest, checkpoints.lost) == (None, True)
        checkpoints.save(4, run.result.state)
        settle(checkpoints)
        assert (checkpoints.newest, checkpoints.lost) == (4, False), said


@pytest.mark.parametrize("what", ["vanished", "replaced"])
def test_a_last_save_that_fails_is_an_error_that_names_the_step(run, tmp_path, what):
    """Case C02. Root may write anywhere, so the folder is not locked but gone, or a file."""
    folder = tmp_path / "run"
    folder.mkdir()
    with (
        pytest.raises(CheckpointError, match=r"step 2 was not saved: .*; none is saved$") as caught,
        checkpoints_in(folder, run.config) as checkpoints,
    ):
        shutil.rmtree(folder)
        if what == "replaced":
            folder.write_text("")
        checkpoints.save(2, run.result.state)
    assert f"{folder} is no longer there" in str(caught.value)
