"""Restoring: bitwise on any mesh; what is missing, different or damaged is named."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.models.position import position_number
from meshwright.trainer.checkpoint.manifest import DamagedError, find_checkpoints
from meshwright.trainer.checkpoint.restore import restore, set_aside, verify_checkpoints
from meshwright.trainer.cli import main
from meshwright.trainer.config.load import override
from meshwright.trainer.state import named_leaves
from states import assert_bitwise, target_on


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1"),
        ("mesh.data=1", "mesh.fsdp=8", "mesh.tensor=1"),
        ("mesh.data=1", "mesh.fsdp=1", "mesh.tensor=4", "layout.zero=1"),
    ],
)
def test_the_state_comes_back_bitwise_on_any_mesh(run, overrides):
    """Case C01."""
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
