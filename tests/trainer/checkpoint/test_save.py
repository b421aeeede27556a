"""Checkpoints: bitwise back on any mesh, the newest and the best kept; what is missing, different,
damaged or refused by the disk is named.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from disk import largest_file
from meshwright.models.position import position_number
from meshwright.trainer.checkpoint.manifest import DamagedError, find_checkpoints, read_manifest
from meshwright.trainer.checkpoint.orbax import plain_path
from meshwright.trainer.checkpoint.restore import restore, set_aside, verify_checkpoints
from meshwright.trainer.checkpoint.save import CheckpointError, open_checkpoints
from meshwright.trainer.cli import main
from meshwright.trainer.config.load import from_yaml, override
from meshwright.trainer.data.tokenizer import ByteTokenizer
from meshwright.trainer.state import abstract_state, lay_out, named_leaves, state_shardings


@contextmanager
def checkpoints_in(path, config, *overrides: str, losses=None, said=None):
    config = override(config, *overrides)
    say = (lambda line: None) if said is None else said.append
    losses = {} if losses is None else losses
    with open_checkpoints(path, config, ByteTokenizer.text, losses, say) as checkpoints:
        yield checkpoints


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
    step, restored = restore(run.folder, target)
    assert step == 6
    assert_bitwise(restored, run.result.state)
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
        assert len(leaf.addressable_shards) == devices


def test_the_parameters_alone(run):
    target, _ = target_on(run.config)
    _, restored = restore(run.folder, {"params": target.params})
    assert list(restored) == ["params"]
    assert_bitwise(restored["params"], run.result.state.params)


def test_any_one_checkpoint_can_be_asked_for(run):
    target, _ = target_on(run.config)
    step, restored = restore(run.folder / "checkpoints" / "3", target)
    assert (step, restored.step.item(), position_number(restored.position)) == (3, 3, 3 * 16)


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
        (["checkpoint.keep=1", "checkpoint.background=false"], {4: 1.0}, [4, 10]),
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


def test_the_manifest_says_what_was_saved(run):
    manifest = read_manifest(run.folder / "checkpoints" / "6")
    assert manifest.step == 6
    assert from_yaml(manifest.config, "manifest") == run.config
    leaves = named_leaves(run.result.state)
    assert set(manifest.leaves) == set(leaves)
    for name, leaf in leaves.items():
        described = manifest.leaves[name]
        assert (described.shape, described.dtype) == (list(leaf.shape), str(leaf.dtype))


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


def test_every_leaf_that_does_not_fit_is_named(run):
    target, _ = target_on(run.config)
    leaves = named_leaves(target)
    wanted = {name: leaf for name, leaf in leaves.items() if name.startswith("params.")}
    wanted["params.layers.attention.q"] = jax.ShapeDtypeStruct((2, 16, 5, 4), np.float32)
    wanted["params.norm"] = jax.ShapeDtypeStruct((16,), jnp.bfloat16)
    wanted["params.router"] = jax.ShapeDtypeStruct((16,), np.float32)
    with pytest.raises(ValueError) as caught:
        restore(run.folder, wanted)
    where, _, faults = str(caught.value).partition(" does not fit: ")
    assert where == str(run.folder / "checkpoints" / "6")
    assert faults.split("; ") == [
        "params.layers.attention.q has shape [2, 16, 4, 4], this run's [2, 16, 5, 4]",
        "params.norm is float32, this run's bfloat16",
        "params.router is missing",
    ]


def test_of_a_whole_state_no_leaf_may_be_left_over(run):
    config = override(run.config, "optimizer.momentum=0.0", "model.tie_embeddings=true")
    target, _ = target_on(config)
    with pytest.raises(ValueError) as caught:
        restore(run.folder, target)
    faults = str(caught.value).partition(" does not fit: ")[2].split("; ")
    assert "params.unembed is not part of this run" in faults
    assert len(faults) > 10
    assert {fault.partition(" ")[2] for fault in faults} == {"is not part of this run"}


# Damage


@pytest.fixture
def damaged(run, tmp_path):
    """A copy of the run folder with checkpoints 3 and 6, to be damaged."""
    return Path(shutil.copytree(run.folder, tmp_path / "copy"))


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def bits(checkpoint: Path) -> list[tuple[Path, int]]:
    """A few bits of every file, in the same order every time."""
    chosen = random.Random(0)
    return [
        (file, chosen.randrange(8 * file.stat().st_size))
        for file in sorted(checkpoint.rglob("*"))
        if file.is_file() and file.stat().st_size
        for _ in range(2)
    ]


@pytest.mark.slow
def test_a_flipped_bit_is_never_restored(run, tmp_path):
    """Each file in turn: what is restored is right, or it is refused by the name of a leaf or file.
    scripts/flip_bits.py does it 120 times."""
    target, _ = target_on(run.config)
    refused = 0
    names = [*named_leaves(target), "every leaf"]
    whole = run.folder / "checkpoints" / "6"
    for file, bit in bits(whole):
        copy = tmp_path / "6"
        shutil.copytree(whole, copy)
        flip(copy / file.relative_to(whole), bit)
        try:
            _, restored = restore(copy, target)
        except DamagedError as error:
            refused += 1
            assert "\n" not in str(error)
            assert any(name in str(error) for name in (*names, file.name)), (file, str(error))
        else:
            assert_bitwise(restored, run.result.state)
        shutil.rmtree(copy)
    assert refused > 5


@pytest.mark.parametrize("what", ["data", "manifest"])
def test_a_truncated_file_is_found_and_verify_names_it(run, damaged, what, capsys):
    checkpoint = damaged / "checkpoints" / "6"
    metadata = checkpoint / "manifest" / "metadata"
    for file in [metadata] if what == "manifest" else (checkpoint / "state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    target, _ = target_on(run.config)
    with pytest.raises(DamagedError) as caught:
        restore(damaged, target)
    expected = "cannot be read" if what == "data" else f"{metadata} is damaged or missing"
    assert expected in str(caught.value)
    assert "checkpoint.fallback=true goes back to an older one, like step 3" in str(caught.value)

    (first, good), (second, bad) = verify_checkpoints(damaged)
    assert (first, good) == (f"step 3: {len(named_leaves(target))} leaves are whole", True)
    assert expected in second
    assert not bad

    assert main(["checkpoint", "verify", str(damaged)]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == first
    assert shown[1].startswith("step 6: ") and expected in shown[1]
    assert main(["checkpoint", "verify", str(damaged / "checkpoints" / "3")]) == 0
    assert capsys.readouterr().out == f"{first}\n"


def test_fallback_takes_the_newest_that_is_whole_and_sets_the_damaged_aside(run, damaged):
    (damaged / "checkpoints" / "6" / "manifest" / "metadata").unlink()
    target, _ = target_on(run.config)
    step, restored = restore(damaged, target, fallback=True)
    assert (step, restored.step.item()) == (3, 3)
    (line,) = set_aside(damaged, step)
    assert line == f"{damaged / 'checkpoints' / '6'}, now in {damaged / 'damaged'}"
    assert list(find_checkpoints(damaged)) == [3]
    assert (damaged / "damaged" / "6" / "state").is_dir()

    (damaged / "checkpoints" / "3" / "manifest" / "metadata").unlink()
    with pytest.raises(DamagedError, match=r"3/manifest/metadata is damaged or missing$"):
        restore(damaged, target, fallback=True)


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


def test_another_version_is_no_damage(run, damaged):
    file = damaged / "checkpoints" / "6" / "manifest" / "metadata"
    content = json.loads(file.read_text())
    content["manifest"]["version"] = 1
    text = json.dumps(content["manifest"], sort_keys=True).encode()
    content["seal"] = hashlib.sha256(text).hexdigest()
    file.write_text(json.dumps(content))
    target, _ = target_on(run.config)
    with pytest.raises(ValueError, match="metadata has version 1, this Meshwright reads 3"):
        restore(damaged, target, fallback=True)


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
def test_c02_a_last_save_that_fails_is_an_error_that_names_the_step(run, tmp_path, what):
    """Root may write anywhere, so the folder is not locked but gone, or a file."""
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
