"""Where a run begins: in a new folder, or at the newest checkpoint of an existing one; and which
changes of the config a resumed run may bring.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .config import Config
from .load import from_yaml, load, show, to_yaml
from .manifest import find_checkpoints, read_manifest

FIXED = ("model", "data", "run.seed", "train.seq_len")
"""What a checkpoint and its data position mean nothing without."""

FREE = ("data.paths", "data.store", "data.prefetch")
"""Keys of those sections that say where documents are, not what they are: see data.json."""

UNLISTED = ("run.dir", "checkpoint")


def run_folder(config: Config) -> Path:
    return Path(os.path.expanduser(config.run.dir), config.run.name)


def begin(folder: Path, config: Config) -> tuple[bool, list[str]]:
    """Whether the run goes on from a checkpoint in its folder, and then what differs from the
    config it was last started with. Changes nothing.

    Raises ValueError where the folder and checkpoint.resume contradict each other, or the config
    changes what may not change.
    """
    resume = config.checkpoint.resume
    if not folder.exists():
        if resume == "must":
            raise ValueError(
                f"checkpoint.resume=must: {folder} does not exist; "
                f"write checkpoint.resume=auto to start it"
            )
        return False, []
    if resume == "never":
        raise ValueError(
            f"{folder} exists already; write run.name=… for a new run, "
            f"or checkpoint.resume=auto to go on with this one"
        )
    written = folder / "config.yaml"
    if not written.is_file() and any(not entry.name.startswith(".") for entry in folder.iterdir()):
        raise ValueError(f"{folder} is not a run folder: it holds no config.yaml")
    try:
        find_checkpoints(folder)
    except ValueError:
        if resume == "must":
            raise
        return False, []  # killed before its first checkpoint
    return True, compare(load(written), config)


def enter(folder: Path, config: Config, made_from: dict[str, Any], *, resumes: bool) -> None:
    """Make the run folder if need be; write config.yaml, and data.json: what the documents were.

    Raises ValueError where a resumed run would read other documents, or there can be no folder.
    """
    data = folder / "data.json"
    if resumes and json.loads(data.read_text(encoding="utf-8")) != made_from:
        raise ValueError(
            f"data: {folder} has been trained on other documents or settings, see its "
            f"data.json; write run.name=… for a new run"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(data, json.dumps(made_from, indent=1))
        _write(folder / "config.yaml", to_yaml(config))
    except OSError as error:
        raise ValueError(f"run.dir={config.run.dir}: {error.strerror}: {folder}") from None


def compare(before: Config, now: Config) -> list[str]:
    """One line for each key that differs. Raises ValueError naming those that may not."""
    lines = _differences(asdict(before), asdict(now))
    refused = [
        line for key, line in lines.items() if _within(key, FIXED) and not _within(key, FREE)
    ]
    if refused:
        raise ValueError(
            f"the run was started with {'; '.join(refused)}; that cannot change when a run "
            f"resumes: write it as it was, or run.name=… for a new run"
        )
    return [line for key, line in lines.items() if not _within(key, UNLISTED)]


def compare_models(source: Path, config: Config) -> list[str]:
    """What differs between the model that a checkpoint (or a run's newest) was trained as and the
    config's, one line a key. Leaves that do not fit are refused when they are restored.
    """
    newest = max(find_checkpoints(source).items())[1]
    before = from_yaml(read_manifest(newest).config, str(newest))
    lines = _differences({"model": asdict(before.model)}, {"model": asdict(config.model)})
    return list(lines.values())


def _write(path: Path, text: str) -> None:
    """Whole or not at all, whenever the process is killed."""
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def _differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Key -> `mesh.data=2, now 4` for every key of two config trees that differs."""
    old, new = _flat(before), _flat(now)
    return {
        key: f"{key}={show(old.get(key))}, now {show(new.get(key))}"
        for key in old | new
        if old.get(key) != new.get(key)
    }


def _flat(tree: dict[str, Any], above: str = "") -> dict[str, Any]:
    """`{"mesh": {"data": 2}}` -> `{"mesh.data": 2}`."""
    flat = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, dict) else {above + key: value}
    return flat


def _within(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)
