"""Checkpoints: bitwise back, on any mesh, the newest kept, and a clear word where there is none."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from meshwright.trainer.checkpoint import open_checkpoints, restore, save
from meshwright.trainer.config import CheckpointConfig
from meshwright.trainer.load import override
from meshwright.trainer.state import abstract_state, lay_out, state_shardings


def target_on(config, *overrides: str):
    """The abstract state with the shardings of another layout, and that layout's device count."""
    config = override(config, "device.cpu_devices=null", *overrides)
    devices = math.prod(config.mesh.sizes().values())
    layout, state = lay_out(config, jax.devices()[:devices]), abstract_state(config)
    shardings = state_shardings(state, layout)
    target = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        shardings,
    )
    return target, devices


def assert_bitwise(restored, state):
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert ours.dtype == theirs.dtype
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1"),
        ("mesh.data=1", "mesh.fsdp=8", "mesh.tensor=1"),
        ("mesh.data=1", "mesh.fsdp=1", "mesh.tensor=4", "layout.zero=1"),
    ],
)
def test_c01_the_state_comes_back_bitwise_on_any_mesh(run, overrides):
    target, devices = target_on(run.config, *overrides)
    restored = restore(run.folder, target)
    assert_bitwise(restored, run.result.state)
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
        assert len(leaf.addressable_shards) == devices


def test_the_parameters_alone(run):
    target, _ = target_on(run.config)
    restored = restore(run.folder, {"params": target.params})
    assert list(restored) == ["params"]
    assert_bitwise(restored["params"], run.result.state.params)


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_are_kept_and_the_newest_of_all_is_restored(run, tmp_path, keep):
    target, _ = target_on(run.config)
    state = run.result.state
    with open_checkpoints(tmp_path, CheckpointConfig(keep=keep)) as manager:
        for step in (2, 4, 9, 10):
            state = state.next(state.params, state.opt, rows=1)
            save(manager, step, state)
    kept = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert kept == [2, 4, 9, 10][-keep:]
    restored = restore(tmp_path, {"step": target.step, "position": target.position})
    assert restored["step"].item() == run.result.state.step.item() + 4
    assert restored["position"].item() == run.result.state.position.item() + 4


def test_leaving_waits_for_what_is_being_written(run, tmp_path):
    with open_checkpoints(tmp_path, CheckpointConfig()) as manager:
        save(manager, 1, run.result.state)
    target, _ = target_on(run.config)
    assert_bitwise(restore(tmp_path, target), run.result.state)


def test_a_checkpoint_is_a_copy_of_its_moment(run, tmp_path):
    """Donating the state to the next step, right after, does not reach what is still written."""
    state = jax.tree.map(lambda leaf: leaf + 0, run.result.state)
    with open_checkpoints(tmp_path, CheckpointConfig()) as manager:
        save(manager, 1, state)
        for leaf in jax.tree.leaves(state):
            leaf.delete()
    target, _ = target_on(run.config)
    assert_bitwise(restore(tmp_path, target), run.result.state)


@pytest.mark.parametrize("folder", ["missing", "empty", "unfinished"])
def test_without_a_finished_checkpoint_one_line_says_so(run, tmp_path, folder):
    if folder != "missing":
        (tmp_path / "checkpoints").mkdir()
    if folder == "unfinished":
        (tmp_path / "checkpoints" / "7.orbax-checkpoint-tmp").mkdir()
    target, _ = target_on(run.config)
    with pytest.raises(ValueError) as caught:
        restore(tmp_path, {"step": target.step})
    assert str(caught.value) == f"{tmp_path / 'checkpoints'} holds no finished checkpoint"
