"""Where documents come from. A document is a name and a text.

The name alone decides whether a document is held out, unless it is the only one. Names are relative
(to the standard library's folder, to the fixed part of a glob): a corpus may move and keeps its
split.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import itertools
import json
import os
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator
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
            folder = os.path.isdir(os.path.expanduser(pattern))
            hint = f", for a folder {pattern.rstrip('/')}/**/*" if folder else ""
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
    """Files that a path or glob matches, by name: the path below the last folder that is meant
    literally. What exists is meant literally, whatever characters it is written with: a path, and
    else the longest beginning of a glob.
    """
    pattern = os.path.expanduser(pattern)
    if os.path.basename(pattern) in ("", ".", ".."):
        return []  # these are folders
    path = Path(pattern)
    if os.path.exists(path):
        return [SourceFile(path.name, path)] if path.is_file() else []
    root = next(parent for parent in path.parents if os.path.exists(parent))
    *parts, last = path.relative_to(root).parts
    if last == "**":  # any file below
        parts, last = [*parts, "**"], "*"
    folders = [root]
    for part in parts:
        if part == "**":
            folders = _below(folders, root)
        else:
            folders = [each for each in _matching(folders, part) if os.path.isdir(each)]
    found = {each for each in _matching(folders, last) if os.path.isfile(each)}
    return sorted(SourceFile(each.relative_to(root).as_posix(), each) for each in found)


def _matching(folders: Iterable[Path], part: str) -> Iterator[Path]:
    """What a part of a glob other than ** matches in the folders, by the rules of Python's glob:
    hidden names only where the part begins with a dot as well.
    """
    for folder in folders:
        names = [part]
        if glob.has_magic(part):
            names = fnmatch.filter((entry.name for entry in _entries(folder)), part)
        for name in names:
            if part.startswith(".") or not name.startswith("."):
                yield folder / name


def _below(starts: Iterable[Path], root: Path) -> list[Path]:
    """The folders that ** matches: `starts`, which lie below `root`, and those below them that are
    not hidden, each once, whatever number of links lead to it.

    A link is followed after all folders that can be reached without one, so that the name of a
    document does not depend on the order of the walk; none is to a folder above its own place.
    """
    found: dict[tuple[int, int], Path] = {}
    real_root = root.resolve()
    starts = [start for start in starts if start == root or not _leads_up(start)]
    waiting = deque(sorted(starts, key=lambda p: p.resolve() != real_root / p.relative_to(root)))
    while waiting:
        folders, links = [waiting.popleft()], []
        while folders:
            folder = folders.pop()
            status = os.stat(folder)
            if found.setdefault((status.st_dev, status.st_ino), folder) is not folder:
                continue
            for entry in _entries(folder):
                if not entry.name.startswith("."):
                    if entry.is_symlink() and os.path.isdir(entry):
                        links.append(folder / entry.name)
                    elif entry.is_dir(follow_symlinks=False):
                        folders.append(folder / entry.name)
        waiting.extend(link for link in sorted(links) if not _leads_up(link))
    return list(found.values())


def _leads_up(link: Path) -> bool:
    """Whether a link is to a folder above it, on the way that led here or on the disk."""
    target = link.resolve()
    return os.path.islink(link) and any(
        folder.resolve().is_relative_to(target) for folder in link.parents
    )


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, by name; nothing where it is gone. Raises OSError where it may not be
    read: documents would be missing without a word.
    """
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


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
    except RecursionError as error:
        raise ValueError(f"{place}: JSON that is nested too deep to be read") from error
    except ValueError as error:  # Python limits the digits that it turns into an integer
        limit = sys.get_int_max_str_digits()
        raise ValueError(f"{place}: a number of more than {limit:,} digits") from error
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
