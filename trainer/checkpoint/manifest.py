"""What stands in a checkpoint, without JAX: its manifest of leaves and config, sealed by a hash.

A checkpoint is a folder STEP with Orbax's items `state`, the arrays by name, `tokenizer`, the
contents of its tokenizer.json, and `manifest`, this JSON. See docs/checkpoints.md.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ..config import Config
from ..config.load import from_yaml, load, override
from ..data.tokenizer import tokenizer_digest
from ..log.metrics import lines_until

VERSION = 4


class DamagedError(RuntimeError):
    """A checkpoint is not what was saved; the message names the leaf or the file."""


@dataclass(frozen=True)
class Leaf:
    """What the manifest says of one leaf. digest: see digest.py."""

    shape: list[int]
    dtype: str
    digest: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    """completed updates"""
    config: str
    """the run's resolved config, as YAML"""
    tokenizer: str
    """digest of its tokenizer.json"""
    leaves: dict[str, Leaf]
    """by name"""


def find_checkpoints(path: Path) -> dict[int, Path]:
    """Step -> folder of the finished checkpoints in a run folder, or of the one that `path` is.
    Raises ValueError where there is none.
    """
    path = path.resolve()
    if is_checkpoint(path):
        return {int(path.name): path}
    folder = run_of(path) / "checkpoints"
    steps = [int(entry.name) for entry in folder.glob("*") if entry.name.isdecimal()]
    if not steps:
        raise ValueError(f"{folder} holds no finished checkpoint")
    return {step: folder / str(step) for step in sorted(steps)}


def folder_of(path: Path, step: int) -> Path:
    """Folder of one of the checkpoints that `find_checkpoints` finds."""
    path = path.resolve()
    return path if is_checkpoint(path) else run_of(path) / "checkpoints" / str(step)


def is_checkpoint(path: Path) -> bool:
    """Whether it is the folder of one; a copy of it may lie anywhere."""
    return path.name.isdecimal() and any((path / item).is_dir() for item in ("state", "manifest"))


def run_of(path: Path) -> Path:
    """The run folder that `path` is, or that it lies in, as one checkpoint or as the folder of them
    all; `path` where there is none. A run, too, may be called checkpoints, or lie in such a folder.
    """
    path = path.resolve()
    if (path / "config.yaml").is_file() or (path / "checkpoints").is_dir():
        return path
    if path.name == "checkpoints":
        return path.parent
    return path.parents[1] if is_checkpoint(path) and path.parent.name == "checkpoints" else path


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint's folder. Raises DamagedError where it is not what was written,
    ValueError for another version of the format.
    """
    return parse_manifest(checkpoint, read_manifest_text(checkpoint))


def newest_checkpoint(path: Path) -> Path:
    """Folder of the newest checkpoint that `path` holds, or is. Raises ValueError where there is
    none.
    """
    return max(find_checkpoints(path).items())[1]


def newest_tokenizer_text(path: Path, *, fallback: bool = False) -> str:
    """`read_tokenizer_text` of the newest checkpoint that `path` holds, or is; with `fallback` of
    the newest that has it undamaged.
    """
    newest, *older = sorted(find_checkpoints(path).items(), reverse=True)
    try:
        return read_tokenizer_text(newest[1])
    except DamagedError as error:
        if not fallback:
            raise DamagedError(f"{error}{fallback_remedy(older)}") from None
        for _, checkpoint in older:
            with suppress(DamagedError):
                return read_tokenizer_text(checkpoint)
        raise


def fallback_remedy(older: Sequence[tuple[int, Path]]) -> str:
    """What a message about a damaged checkpoint ends with, where there are older ones."""
    if not older:
        return ""
    return f"; checkpoint.fallback=true goes back to an older one, like step {older[0][0]}"


def read_tokenizer_text(checkpoint: Path) -> str:
    """What the tokenizer.json of a checkpoint's parameters says. Raises DamagedError where it is
    not what was written.
    """
    manifest, file = read_manifest(checkpoint), checkpoint / "tokenizer" / "metadata"
    try:
        text = file.read_text(encoding="utf-8")
        if tokenizer_digest(text) == manifest.tokenizer:
            return text
    except (FileNotFoundError, ValueError, RecursionError):
        pass
    raise DamagedError(f"{file} is damaged or missing")


def config_of(path: Path, *overrides: str) -> Config:
    """The config of a run folder, or of a checkpoint that lies in none, with overrides. Raises
    ValueError where `path` is neither.
    """
    written = run_of(path) / "config.yaml"
    if written.is_file():
        return load(written, *overrides)
    if not is_checkpoint(path.resolve()):
        raise ValueError(f"{written} does not exist; RUN is a folder that meshwright train wrote")
    return override(from_yaml(read_manifest(path.resolve()).config, str(path)), *overrides)


def read_manifest_text(checkpoint: Path) -> str:
    """What stands in the manifest's file; nothing where it is missing or no text."""
    try:
        return (checkpoint / "manifest" / "metadata").read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        return ""


def parse_manifest(checkpoint: Path, text: str) -> Manifest:
    """The manifest in a file's text. Raises as `read_manifest` does."""
    file = checkpoint / "manifest" / "metadata"
    try:
        content = json.loads(text)
        if content["seal"] != _seal(content["manifest"]):
            raise ValueError
        version = content["manifest"].pop("version")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedError(f"{file} is damaged or missing") from None
    if version != VERSION:
        raise ValueError(f"{file} has version {version}, this Meshwright reads {VERSION}")
    leaves = {name: Leaf(**leaf) for name, leaf in content["manifest"].pop("leaves").items()}
    return Manifest(**content["manifest"], leaves=leaves)


def sealed(manifest: Manifest) -> dict[str, Any]:
    content = {"version": VERSION} | asdict(manifest)
    return {"manifest": content, "seal": _seal(content)}


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def list_checkpoints(path: Path) -> Iterator[str]:
    """A line for each checkpoint of a run: step, time, bytes on disk, held-out loss."""
    found = find_checkpoints(path)
    losses = {}
    metrics = run_of(next(iter(found.values()))) / "metrics.jsonl"
    if metrics.is_file():
        history, _ = lines_until(metrics, max(found))
        losses = {line["step"]: line["eval_loss"] for line in history if line.get("eval_loss")}
    yield f"{'step':>8}  {'saved at':<19}  {'bytes':>15}  held-out loss"
    for step, folder in found.items():
        files = [file.stat() for file in folder.rglob("*") if file.is_file()]
        saved = datetime.fromtimestamp(folder.stat().st_mtime).isoformat(" ", "seconds")
        loss = f"{losses[step]:.4f}" if step in losses else "-"
        yield f"{step:>8}  {saved}  {sum(file.st_size for file in files):>15,}  {loss}"


def show_checkpoint(path: Path) -> Iterator[str]:
    """The config and the leaves of the newest checkpoint that `path` holds, or is."""
    step, folder = max(find_checkpoints(path).items())
    manifest = read_manifest(folder)
    yield f"{folder}: after {step} updates"
    yield manifest.config
    width = max(map(len, manifest.leaves))
    for name, leaf in manifest.leaves.items():
        yield f"{name:<{width}}  {leaf.dtype:<8}  {leaf.digest:08x}  {leaf.shape}"
    elements = sum(math.prod(leaf.shape) for leaf in manifest.leaves.values())
    yield f"{len(manifest.leaves)} leaves, {elements:,} elements"
