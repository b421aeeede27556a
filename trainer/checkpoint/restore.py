"""Restoring on any mesh: what comes back is what the manifest says was saved, or is refused by
name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from ...sharding.layout import Layout
from ..config import Config
from ..runtime.processes import any_process, on_first
from ..state import State, named_leaves, sharded_shapes
from .digest import digests, host_digest
from .layer_order import in_stage_order, model_order_shapes
from .manifest import (
    DamagedError,
    Manifest,
    fallback_remedy,
    find_checkpoints,
    folder_of,
    parse_manifest,
    read_manifest,
    read_manifest_text,
    read_tokenizer_text,
)
from .orbax import hush_orbax, plain_path, reason


def restore(path: Path, target: Any, *, fallback: bool = False) -> tuple[int, Any]:
    """Step and leaves of a checkpoint: the newest of the run folder `path`, or `path` itself.

    target: a State, or a part of it as {"params": ...}, of ShapeDtypeStructs with shardings
    (`sharded_shapes`). A part is asked for by its own names; of a State every leaf must be there
    and no other. fallback: where the newest is damaged, take the newest that is not.

    Raises ValueError when there is no checkpoint or its leaves are not those of the target, naming
    every one; DamagedError when what is read is not what was saved.
    """
    # of several processes one looks: a shared folder may show them different things
    steps = on_first(lambda: sorted(find_checkpoints(path), reverse=True))
    candidates = [(step, folder_of(path, step)) for step in steps]
    damage: list[str] = []
    for step, folder in candidates if fallback else candidates[:1]:
        try:
            return step, _restore(folder, target)
        except DamagedError as error:
            damage.append(str(error))
    raise DamagedError("; ".join(damage) + ("" if fallback else fallback_remedy(candidates[1:])))


def restore_part(
    path: Path,
    config: Config,
    layout: Layout,
    part: Callable[[State], Any],
    *,
    fallback: bool = False,
) -> tuple[int, Any]:
    """`restore` for a run of this config: `part` of its State, or all of it, with layers in the
    order in which the config's stages hold them, whatever pipeline saved it.
    """
    step, restored = restore(path, part(model_order_shapes(config, layout)), fallback=fallback)
    return step, in_stage_order(restored, part(sharded_shapes(config, layout)), config)


def set_aside(run: Path, step: int) -> list[str]:
    """Move the run's checkpoints after `step`, which are damaged, into its folder `damaged`."""
    later = [folder for at, folder in find_checkpoints(run).items() if at > step]
    for folder in later:
        place = run / "damaged" / folder.name
        place.parent.mkdir(exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        folder.rename(place)
    return [f"{folder}, now in {run / 'damaged'}" for folder in later]


def _restore(checkpoint: Path, target: Any) -> Any:
    manifest = parse_manifest(checkpoint, on_first(lambda: read_manifest_text(checkpoint)))
    names = named_leaves(target)
    _compare(checkpoint, manifest, names, whole=isinstance(target, State))
    arguments = ocp.args.PyTreeRestore(
        item=names,
        restore_args=ocp.checkpoint_utils.construct_restore_args(names),
        partial_restore=True,
    )
    try:
        restored, failure = _read(checkpoint, arguments), None
        for name in names:  # what Orbax's own metadata do not name it leaves as it was
            if not isinstance(restored[name], jax.Array):
                raise ValueError(f"{name} is missing")
    except Exception as error:  # whatever a damaged file makes of Orbax, tensorstore and JSON
        if isinstance(error, MemoryError) or (
            isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
        ):
            raise  # the machine's fault: the checkpoint may be whole
        restored, failure = {}, error
    if any_process(failure is not None):
        why = reason(failure) if failure else "another process could not read its part"
        damage = find_damage(checkpoint, manifest)
        raise DamagedError(
            _describe_damage(checkpoint, damage) or f"{checkpoint} cannot be read: {why}"
        )
    marks = jax.device_get(digests(restored))
    damaged = {
        name: f"digest {marks[name]:08x}, saved as {manifest.leaves[name].digest:08x}"
        for name in names
        if marks[name] != manifest.leaves[name].digest
    }
    if damaged:
        raise DamagedError(_describe_damage(checkpoint, damaged))
    return jax.tree.unflatten(jax.tree.structure(target), [restored[name] for name in names])


def _read(checkpoint: Path, arguments: Any) -> Any:
    hush_orbax()
    with (
        plain_path(checkpoint / "state") as folder,
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader,
    ):
        return reader.restore(folder, args=arguments)


def _compare(checkpoint: Path, manifest: Manifest, names: dict[str, Any], *, whole: bool) -> None:
    """Raises ValueError naming every leaf that the two sides do not have alike."""
    faults = [f"{name} is missing" for name in names if name not in manifest.leaves]
    if whole:
        faults += [
            f"{name} is not part of this run" for name in manifest.leaves if name not in names
        ]
    for name in names.keys() & manifest.leaves.keys():
        saved, wanted = manifest.leaves[name], names[name]
        if saved.shape != list(wanted.shape):
            faults.append(f"{name} has shape {saved.shape}, this run's {list(wanted.shape)}")
        if saved.dtype != str(wanted.dtype):
            faults.append(f"{name} is {saved.dtype}, this run's {wanted.dtype}")
    if faults:
        raise ValueError(f"{checkpoint} does not fit: {'; '.join(sorted(faults))}")


def find_damage(checkpoint: Path, manifest: Manifest) -> dict[str, str]:
    """Name -> what is wrong: Orbax's own descriptions that are no JSON any more, or every leaf that
    is not what was saved. Reads one leaf at a time into host memory.
    """
    if damage := {str(file): "is no JSON" for file in _descriptions(checkpoint) if _torn(file)}:
        return damage
    for name, saved in manifest.leaves.items():
        arguments = ocp.args.PyTreeRestore(
            item={name: 0},
            restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)},
            partial_restore=True,
        )
        try:
            leaf = _read(checkpoint, arguments)[name]
            if isinstance(leaf, int):  # the target's own 0, see `_restore`
                raise ValueError("missing")
            leaf = np.asarray(leaf)
        except Exception as error:  # as in `_restore`
            damage[name] = f"cannot be read: {reason(error)}"
            continue
        if (list(leaf.shape), str(leaf.dtype)) != (saved.shape, saved.dtype):
            damage[name] = (
                f"is {leaf.dtype} {list(leaf.shape)}, saved as {saved.dtype} {saved.shape}"
            )
        elif (mark := host_digest(leaf)) != saved.digest:
            damage[name] = f"digest {mark:08x}, saved as {saved.digest:08x}"
    if len(damage) == len(manifest.leaves):
        return {"every leaf": damage.popitem()[1]}
    return damage


def _descriptions(checkpoint: Path) -> list[Path]:
    return [
        *checkpoint.glob("_*"),
        *checkpoint.glob("state/_*"),
        *checkpoint.glob("state/array_*/*"),
    ]


def _torn(file: Path) -> bool:
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return True
    return False


def _describe_damage(checkpoint: Path, damage: dict[str, str]) -> str:
    return (
        f"{checkpoint} is damaged: " + "; ".join(f"{name} {what}" for name, what in damage.items())
        if damage
        else ""
    )


def verify_checkpoints(path: Path) -> Iterator[tuple[str, bool]]:
    """A line about each checkpoint that `path` holds, or is, and whether it is whole: every leaf
    is read and its digest compared.
    """
    for step, checkpoint in find_checkpoints(path).items():
        try:
            manifest = read_manifest(checkpoint)
            read_tokenizer_text(checkpoint)
            damage = find_damage(checkpoint, manifest)
        except DamagedError as error:
            yield f"step {step}: {error}", False
            continue
        line = _describe_damage(checkpoint, damage) or f"{len(manifest.leaves)} leaves are whole"
        yield f"step {step}: {line}", not damage
