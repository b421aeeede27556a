"""Where a run begins: in a new folder, or at the newest checkpoint of an existing one; and which
changes of the config a resumed run may bring.
"""

from __future__ import annotations

import fcntl
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...sharding.keys import user_path
from ..config import AUTO, Config
from ..config.differences import differences, within
from ..config.load import from_yaml, load, to_yaml
from ..data.store import Store, documents_of
from .manifest import find_checkpoints, newest_checkpoint, read_manifest

FIXED = ("model", "data", "run.seed", "train.seq_len")
"""What a checkpoint and its data position mean nothing without."""

FREE = ("data.paths", "data.store", "data.prefetch")
"""Keys of those sections that say where documents are, not what they are: see data.json."""

UNLISTED = ("run.dir", "checkpoint")


def named(config: Config) -> Config:
    """`config` with a free name in place of run.name=auto."""
    if config.run.name != AUTO:
        return config
    names = (f"run-{number}" for number in itertools.count(1))
    folder = user_path(config.run.dir)
    free = next(name for name in names if not (folder / name).exists())
    return replace(config, run=replace(config.run, name=free))


def run_folder(config: Config) -> Path:
    return user_path(config.run.dir) / config.run.name


def resumes_from(folder: Path, config: Config) -> tuple[bool, list[str]]:
    """Whether the run goes on from a checkpoint in its folder, and then what differs from the
    config it was last started with. Changes nothing.

    Raises ValueError where the folder and checkpoint.resume contradict each other, or the config
    changes what may not change.
    """
    resume = config.checkpoint.resume
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"run.dir={config.run.dir}: {folder} is a file; write another run.name=…")
    if not folder.exists() or all(entry.name.startswith(".") for entry in folder.iterdir()):
        if resume == "must":
            raise ValueError(
                f"checkpoint.resume=must: {folder} does not exist; "
                f"write checkpoint.resume=auto to start it"
            )
        return False, []
    if resume == "never":
        raise ValueError(
            f"{folder} exists already; write run.name=… for a new run (run.name={AUTO} takes the "
            f"next free name), or checkpoint.resume=auto to go on with this one"
        )
    written = folder / "config.yaml"
    if not written.is_file():
        raise ValueError(f"{folder} is not a run folder: it holds no config.yaml")
    try:
        find_checkpoints(folder)
    except ValueError:
        if resume == "must":
            raise
        return False, []  # killed before its first checkpoint
    return True, compare(load(written.absolute()), config)


@contextmanager
def hold(folder: Path, config: Config) -> Iterator[None]:
    """Make the run folder if need be and lock it: no other run may write there until this ends,
    however it ends. Raises ValueError where another does, or there can be no folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise ValueError(f"run.dir={config.run.dir}: {error.strerror}: {folder}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder} is being trained already, by another process") from None
        except OSError:
            pass  # a filesystem without locks
        try:
            yield
        finally:
            with suppress(OSError):  # the folder may be gone
                if [entry.name for entry in folder.iterdir()] == [".lock"]:  # nothing came of it
                    (folder / ".lock").unlink()
                    folder.rmdir()


@dataclass(frozen=True)
class TrainedOn:
    """data.json of a run folder."""

    documents: dict[str, Any]
    """what they were, see `documents_of`"""
    store: str
    """the token store that was read, where this machine had it"""


def read_trained_on(folder: Path) -> TrainedOn:
    """What a run was trained on. Raises ValueError where its data.json does not say."""
    data = folder / "data.json"
    try:
        return TrainedOn(**json.loads(data.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError, RecursionError):
        raise ValueError(f"{data} is missing or damaged; it says what was trained on") from None


def check_data(folder: Path, documents: dict[str, Any]) -> None:
    """Raises ValueError where a resumed run would read other documents than before."""
    if read_trained_on(folder).documents != documents:
        raise ValueError(
            f"data: {folder} has been trained on other documents or settings, see its "
            f"data.json; write run.name=… for a new run"
        )


def write_run_files(folder: Path, config: Config, store: Store) -> None:
    """Write config.yaml; data.json, what the documents were; and tokenizer.json. Raises OSError."""
    trained_on = TrainedOn(documents_of(store.description.made_from), str(store.path.absolute()))
    _write(folder / "config.yaml", to_yaml(config))
    _write(folder / "data.json", json.dumps(asdict(trained_on), indent=1))
    _write(folder / "tokenizer.json", store.tokenizer.text)


def as_one_process(config: Config, processes: int) -> Config:
    """The config as the run folder keeps it: for one process with the devices of all, so that it
    can be opened anywhere.
    """
    device = config.device
    simulated = None if device.cpu_devices is None else device.cpu_devices * processes
    alone = replace(config.launch, coordinator=None, process_id=None, process_count=None)
    return replace(config, device=replace(device, cpu_devices=simulated), launch=alone)


def compare(before: Config, now: Config) -> list[str]:
    """One line for each key that differs. Raises ValueError naming those that may not."""
    lines = differences(asdict(before), asdict(now))
    if "f16" in (before.precision.compute, now.precision.compute) and "precision.compute" in lines:
        raise ValueError(
            f"the run was started with {lines['precision.compute']}; only f16 keeps a loss scale: "
            f"write it as it was, or checkpoint.init_from=… for a new run from its parameters"
        )
    refused = [line for key, line in lines.items() if within(key, FIXED) and not within(key, FREE)]
    if refused:
        raise ValueError(
            f"the run was started with {'; '.join(refused)}; that cannot change when a run "
            f"resumes: write it as it was, or run.name=… for a new run"
        )
    return [line for key, line in lines.items() if not within(key, UNLISTED)]


def compare_models(source: Path, config: Config) -> list[str]:
    """What differs between the model that a checkpoint (or a run's newest) was trained as and the
    config's, one line a key. Leaves that do not fit are refused when they are restored.
    """
    newest = newest_checkpoint(source)
    before = from_yaml(read_manifest(newest).config, str(newest))
    lines = differences({"model": asdict(before.model)}, {"model": asdict(config.model)})
    return list(lines.values())


def _write(path: Path, text: str) -> None:
    """Whole or not at all, whenever the process is killed."""
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
