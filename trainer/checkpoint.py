"""Checkpoints: the state's leaves by name in Orbax, written in the background, opened on any mesh;
what comes back is what the manifest says was saved, or is refused by name.

A leaf's name is its path in `State` (`params.blocks.attention.q`); its array is the whole logical
one, so shards on disk bind no later mesh. A checkpoint's label is the number of completed updates.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, LatestN

from ..sharding.keys import is_utf8
from .config import Config
from .data.tokenizer import tokenizer_digest
from .digest import digests, host_digest
from .load import to_yaml
from .manifest import (
    DamagedError,
    Leaf,
    Manifest,
    fallback_remedy,
    find_checkpoints,
    folder_of,
    parse_manifest,
    read_manifest,
    read_manifest_text,
    read_tokenizer_text,
    sealed,
)
from .processes import any_process, is_first, on_first
from .state import State, named_leaves
from .stop import in_background


class CheckpointError(RuntimeError):
    """The disk refuses to take a checkpoint; the message names the newest there is."""


# Saving


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
        tokenizer: str,
        losses: dict[int, float],
        say: Callable[[str], None],
    ):
        self.losses = losses
        self.lost = False
        self._run = run
        self._old = run / "checkpoints" / "old"
        self._config = config
        self._tokenizer = tokenizer
        self._say = say
        self._pending: int | None = None
        self._links = ExitStack()
        self._manager: ocp.CheckpointManager | None = self._open()
        self.newest = self._manager.latest_step()

    def _open(self) -> ocp.CheckpointManager:
        _hush_orbax()
        if is_first():  # of saves that were killed or failed; their last writers may still be there
            for unfinished in (self._run / "checkpoints").glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(unfinished, ignore_errors=True)
            shutil.rmtree(self._old, ignore_errors=True)
        config = self._config.checkpoint
        best = [_Best(self.losses)] if config.keep_best else []
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy([LatestN(config.keep), *best]),
            todelete_subdir=self._old.name,  # a folder that is deleted in place is half there
            enable_async_checkpointing=config.background,
            async_options=ocp.AsyncOptions(timeout_secs=int(self._config.device.timeout) + 1),
        )
        self._links.close()
        (self._run / "checkpoints").mkdir(parents=True, exist_ok=True)
        folder = self._links.enter_context(plain_path(self._run / "checkpoints"))
        return ocp.CheckpointManager(folder, options=options)

    def save(self, step: int, state: State) -> None:
        """Copy the state off the devices and write it under the label `step`; with
        checkpoint.background=false, wait until it is written.

        Raises CheckpointError as `check` does, also for the save before, which it waits for.
        """
        if step in (self.newest, self._pending):
            return
        self.wait()
        leaves = named_leaves(state)
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
        if not self._config.checkpoint.background:
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
        line = f"the checkpoint of step {step} was not saved: {_reason(error)}; {newest}"
        if self._config.checkpoint.required:
            raise CheckpointError(line) from error
        self._say(line)


@contextmanager
def open_checkpoints(
    run: Path,
    config: Config,
    tokenizer: str,
    losses: dict[int, float],
    say: Callable[[str], None],
) -> Iterator[Checkpoints]:
    """The checkpoints of the run in folder `run`; leaving waits for what is still being written,
    and raises CheckpointError if it fails.
    """
    checkpoints = Checkpoints(run, config, tokenizer, losses, say)
    try:
        yield checkpoints
        checkpoints.wait()
    except BaseException:
        with suppress(OSError, ValueError, RuntimeError):  # not instead of what happened
            checkpoints.close()
        raise
    checkpoints.close()


@contextmanager
def plain_path(path: Path) -> Iterator[Path]:
    """`path` under a name that Orbax and tensorstore take literally. They read some characters as a
    pattern or a URL, and say nothing when what they have written is not found again; then it is a
    link to the folder, in the machine's folder for temporary files, as long as the context lasts.
    """
    path = path.absolute()
    if not special(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        link = Path(folder, "link")
        if special(link):
            raise ValueError(f"TMPDIR={folder}: Orbax cannot use this path; write another TMPDIR")
        link.symlink_to(path)
        yield link


def special(path: Path) -> bool:
    """Whether Orbax or tensorstore may take something in an absolute path for a pattern or URL, or
    cannot take it because it is not UTF-8.
    """
    text = str(path)
    return bool(re.search(r"[*?\[\]\\]|:/", text)) or not is_utf8(text)


@dataclass
class _Best:
    """Orbax's preservation policy that keeps the checkpoint with the lowest held-out loss."""

    losses: dict[int, float]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        finite = {step for step, loss in self.losses.items() if math.isfinite(loss)}
        known = [info.step for info in checkpoints if info.step in finite]
        best = min(known, key=self.losses.__getitem__, default=None)
        return [info.step == best for info in checkpoints]


def _reason(error: Exception) -> str:
    """An error of the disk in a few words; tensorstore wraps the system's in many."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    found = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(found[1])) if found else str(error).partition("\n")[0][:300]


@functools.cache
def _hush_orbax() -> None:
    """Where Orbax fails it raises the first error, which we report. It also logs it with its whole
    traceback, and the parts that were under way beside it each print another when they end.
    """
    for logger in ("absl", "asyncio"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine '.*' was never awaited", RuntimeWarning)
    print_unraisable = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        abandoned = code is not None and "orbax" in code.co_filename
        if not abandoned and str(unraisable.exc_value) != "Event loop is closed":
            print_unraisable(unraisable)

    sys.unraisablehook = hook


# Restoring


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
        reason = _reason(failure) if failure else "another process could not read its part"
        damage = find_damage(checkpoint, manifest)
        raise DamagedError(
            _describe_damage(checkpoint, damage) or f"{checkpoint} cannot be read: {reason}"
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
    _hush_orbax()
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
            damage[name] = f"cannot be read: {_reason(error)}"
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
