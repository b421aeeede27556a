"""Where documents come from. A document is a name and a text.

The name alone decides whether a document is held out, unless it is the only one. Names are relative
(to the standard library's folder, to the fixed part of a glob): a corpus may move and keeps its
split.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..config import DataConfig

LEFT_OUT_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
"""Folders of the standard library whose files are tests or not part of it."""


class SourceFile(NamedTuple):
    name: str
    path: Path


class Document(NamedTuple):
    name: str
    text: str


def documents(config: DataConfig) -> Iterator[Document]:
    """Documents of data.source in a fixed order: files by name, a JSONL file's documents by line.

    Raises ValueError naming file and place for undecodable bytes and bad lines. Files of the
    standard library that are not UTF-8 are passed over: they are not the user's to repair.
    """
    for file in source_files(config):
        if config.source == "jsonl":
            yield from _json_lines(file, config.field)
            continue
        content = file.path.read_bytes()
        try:
            yield Document(file.name, content.decode())
        except UnicodeDecodeError as error:
            if config.source != "stdlib":
                raise ValueError(_not_utf8(file.path, error, 0)) from error


def split_texts(config: DataConfig) -> Iterator[tuple[str, str]]:
    """Every text that is not empty, after its side, train or heldout.

    A document's name decides; of a single document the last `data.holdout` is held out.
    """
    texts = (document for document in documents(config) if document.text)
    head = list(itertools.islice(texts, 2))
    if len(head) == 1:
        (text,) = (document.text for document in head)
        cut = len(text) - round(config.holdout * len(text))
        for split, part in (("train", text[:cut]), ("heldout", text[cut:])):
            if part:
                yield split, part
        return
    for name, text in itertools.chain(head, texts):
        yield "heldout" if is_held_out(name, config.holdout) else "train", text


def source_files(config: DataConfig) -> list[SourceFile]:
    """Files of stdlib, text or jsonl. Raises ValueError for a path or glob that matches no file."""
    if config.source == "stdlib":
        return _stdlib_files()
    files: dict[Path, SourceFile] = {}
    for pattern in config.paths:
        matches = _matches(pattern)
        if not matches:
            hint = f", for a folder {pattern}/**/*" if os.path.isdir(pattern) else ""
            raise ValueError(
                f"data.paths=[{pattern}] matches no file; write a file or a glob{hint}"
            )
        for file in matches:
            files.setdefault(file.path.resolve(), file)
    return list(files.values())


def fingerprint(config: DataConfig) -> str:
    """SHA-256 over the names and contents of the source files."""
    digest = hashlib.sha256()
    for name, path in source_files(config):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
        digest.update(os.fsencode(name) + b"\0" + content)
    return digest.hexdigest()


def is_held_out(name: str, share: float) -> bool:
    """Whether a hash of the name is among the first `share` of all hashes."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8]) < share * 2**64


def _stdlib_files() -> list[SourceFile]:
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in LEFT_OUT_FOLDERS]
        paths = [Path(folder, name) for name in names if name.endswith(".py")]
        files += [SourceFile(path.relative_to(root).as_posix(), path) for path in paths]
    return sorted(files)


def _matches(pattern: str) -> list[SourceFile]:
    """Files a path or glob matches, by name: the path below the last folder without a wildcard."""
    pattern = os.path.expanduser(pattern)
    root = Path(pattern).parent
    while glob.has_magic(str(root)):
        root = root.parent
    found = [Path(match) for match in glob.glob(pattern, recursive=True)]
    return sorted(SourceFile(p.relative_to(root).as_posix(), p) for p in found if p.is_file())


def _json_lines(file: SourceFile, key: str) -> Iterator[Document]:
    offset = 0
    with file.path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise ValueError(_not_utf8(file.path, error, offset)) from error
            offset += len(line)
            if text.strip():
                place = f"{file.path}, line {number}"
                yield Document(f"{file.name}:{number}", _json_text(text, key, place))


def _json_text(line: str, key: str, place: str) -> str:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON ({error.msg}, column {error.colno})") from error
    if not isinstance(value, dict) or not isinstance(value.get(key), str):
        found = f"keys {', '.join(value)}" if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"{place}: no string under data.field={key} (found {found})")
    try:
        value[key].encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place}: data.field={key} holds half a surrogate pair, no text"
        ) from error
    return value[key]


def _not_utf8(path: Path, error: UnicodeDecodeError, offset: int) -> str:
    byte, place = error.object[error.start], offset + error.start
    return (
        f"{path}: byte 0x{byte:02x} at offset {place} is not UTF-8; "
        "convert the file or leave it out of data.paths"
    )
