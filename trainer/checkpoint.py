"""Checkpoints: the state's leaves by name in Orbax, written in the background, opened on any mesh.

A leaf's name is its path in `State` (`params.blocks.attention.q`); its array is the whole logical
one, so shards on disk bind no later mesh. A checkpoint's label is the number of completed updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from .config import CheckpointConfig
from .state import State, named_leaves


@contextmanager
def open_checkpoints(run: Path, config: CheckpointConfig) -> Iterator[ocp.CheckpointManager]:
    """The run's checkpoint folder, `keep` newest kept; leaving waits for what is still being
    written.
    """
    options = ocp.CheckpointManagerOptions(max_to_keep=config.keep, enable_async_checkpointing=True)
    with ocp.CheckpointManager((run / "checkpoints").absolute(), options=options) as manager:
        yield manager


def save(manager: ocp.CheckpointManager, step: int, state: State) -> None:
    """Copy the state off the devices and write it in the background under the label `step`."""
    manager.save(step, args=ocp.args.Composite(state=ocp.args.PyTreeSave(named_leaves(state))))


def restore(run: Path, target: Any) -> Any:
    """The leaves of `target` from the newest checkpoint: a part of a State, of ShapeDtypeStructs
    with shardings (`sharded_shapes`). Raises ValueError when the run has no checkpoint.
    """
    folder = (run / "checkpoints").absolute()
    options = ocp.CheckpointManagerOptions(create=False)
    if not folder.is_dir():
        raise ValueError(f"{folder} holds no finished checkpoint")
    with ocp.CheckpointManager(folder, options=options) as manager:
        step = manager.latest_step()
        if step is None:
            raise ValueError(f"{folder} holds no finished checkpoint")
        names = named_leaves(target)
        arguments = ocp.args.PyTreeRestore(
            item=names,
            restore_args=ocp.checkpoint_utils.construct_restore_args(names),
            partial_restore=True,
        )
        restored = manager.restore(step, args=ocp.args.Composite(state=arguments))["state"]
    return jax.tree.unflatten(jax.tree.structure(target), [restored[name] for name in names])
