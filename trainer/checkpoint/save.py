"""Saving: the state's leaves by name in Orbax, written in the background.

A leaf's name is its path in `State` (`params.layers.attention.q`); its array is the whole logical
one, and layers stand in the model's order, so neither the mesh nor the pipeline that saved binds a
later one. A checkpoint's label is the number of completed updates.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, LatestN

from ...sharding.layout import Layout
from ..config import Config
from ..config.load import to_yaml
from ..data.tokenizer import tokenizer_digest
from ..runtime.processes import any_process, is_first
from ..runtime.stop import in_background
from ..state import State, named_leaves
from .digest import digests
from .layer_order import in_model_order, model_order_shapes
from .manifest import Leaf, Manifest, sealed
from .orbax import hush_orbax, plain_path, reason


class CheckpointError(RuntimeError):
    """The disk refuses to take a checkpoint; the message names the newest there is."""


class Checkpoints:
    """The checkpoints of a run while it trains: written in the background, the newest `keep` kept
    and the one with the lowest held-out loss.

    tokenizer: the text of its tokenizer.json. losses: held-out loss by step, filled in by the run.
    newest: step of the newest that is committed. lost: whether a save has failed since.
    """

    def __init__(
        self,
        run: Path,
        config: Config,
        layout: Layout,
        tokenizer: str,
        losses: dict[int, float],
        say: Callable[[str], None],
    ):
        self.losses = losses
        self.lost = False
        self._run = run
        self._old = run / "checkpoints" / "old"
        self._config = config
        self._layout = layout
        self._tokenizer = tokenizer
        self._say = say
        self._pending: int | None = None
        self._links = ExitStack()
        self._manager: ocp.CheckpointManager | None = self._open()
        self.newest = self._manager.latest_step()

    def _open(self) -> ocp.CheckpointManager:
        hush_orbax()
        if is_first():  # of saves that were killed or failed; their last writers may still be there
            for unfinished in (self._run / "checkpoints").glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(unfinished, ignore_errors=True)
            shutil.rmtree(self._old, ignore_errors=True)
        config = self._config.checkpoint
        best = [_Best(self.losses)] if config.keep_best else []
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy([LatestN(config.keep), *best]),
            todelete_subdir=self._old.name,  # a folder that is deleted in place is half there
            enable_async_checkpointing=config.asynchronous,
            async_options=ocp.AsyncOptions(timeout_secs=int(self._config.launch.timeout) + 1),
        )
        self._links.close()
        (self._run / "checkpoints").mkdir(parents=True, exist_ok=True)
        folder = self._links.enter_context(plain_path(self._run / "checkpoints"))
        return ocp.CheckpointManager(folder, options=options)

    def save(self, step: int, state: State) -> None:
        """Copy the state off the devices and write it under the label `step`; with
        checkpoint.asynchronous=false, wait until it is written.

        Raises CheckpointError as `check` does, also for the save before, which it waits for.
        """
        if step in (self.newest, self._pending):
            return
        self.wait()
        target = model_order_shapes(self._config, self._layout)
        leaves = named_leaves(in_model_order(state, target, self._config))
        marks = jax.device_get(digests(leaves))
        described = {
            name: Leaf(list(leaf.shape), str(leaf.dtype), int(marks[name]))
            for name, leaf in leaves.items()
        }
        digest = tokenizer_digest(self._tokenizer)
        manifest = Manifest(step, to_yaml(self._config), digest, described)
        try:
            if any_process(is_first() and not self._run.is_dir()):
                raise FileNotFoundError(f"{self._run} is no longer there")
            self._manager = self._manager or self._open()
            saved = self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(leaves),
                    tokenizer=ocp.args.JsonSave(json.loads(self._tokenizer)),
                    manifest=ocp.args.JsonSave(sealed(manifest)),
                ),
            )
            if not saved:
                raise ValueError("there is a later one")
        except (OSError, ValueError, RuntimeError) as error:
            self._failed(step, error)
            return
        self._pending = step
        if not self._config.checkpoint.asynchronous:
            self.wait()

    def check(self) -> None:
        """Find out, without waiting, whether a background save has failed since.

        Raises CheckpointError, or with checkpoint.required=false says it.
        """
        if self._manager is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written. Raises as `check` does."""
        if self._pending is None or self._manager is None:
            return
        step, self._pending = self._pending, None
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:
            self._failed(step, error)
        else:
            self.newest, self.lost = step, False
            if is_first():
                in_background(lambda: shutil.rmtree(self._old, ignore_errors=True))

    def close(self) -> None:
        with self._links:
            if self._manager is not None:
                self._manager.close()

    def _failed(self, step: int, error: Exception) -> None:
        # a manager raises its errors again and again: the next save opens another
        with suppress(OSError, ValueError, RuntimeError):
            self.close()
        self._manager, self.lost = None, True
        newest = "none is saved" if self.newest is None else f"the newest is of step {self.newest}"
        line = f"the checkpoint of step {step} was not saved: {reason(error)}; {newest}"
        if self._config.checkpoint.required:
            raise CheckpointError(line) from error
        self._say(line)


@contextmanager
def open_checkpoints(
    run: Path,
    config: Config,
    layout: Layout,
    tokenizer: str,
    losses: dict[int, float],
    say: Callable[[str], None],
) -> Iterator[Checkpoints]:
    """The checkpoints of the run in folder `run`; leaving waits for what is still being written,
    and raises CheckpointError if it fails.
    """
    checkpoints = Checkpoints(run, config, layout, tokenizer, losses, say)
    try:
        yield checkpoints
        checkpoints.wait()
    except BaseException:
        with suppress(OSError, ValueError, RuntimeError):  # not instead of what happened
            checkpoints.close()
        raise
    checkpoints.close()


@dataclass
class _Best:
    """Orbax's preservation policy that keeps the checkpoint with the lowest held-out loss."""

    losses: dict[int, float]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        finite = {step for step, loss in self.losses.items() if math.isfinite(loss)}
        known = [info.step for info in checkpoints if info.step in finite]
        best = min(known, key=self.losses.__getitem__, default=None)
        return [info.step == best for info in checkpoints]
