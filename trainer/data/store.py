"""The token store: tokenised documents on disk, memory-mapped.

A folder with, for each split (`train`, `heldout`), `SPLIT.tokens` (the stream: every document's
ids, then end-of-text; flat little-endian uint16 or uint32) and `SPLIT.offsets.npy` (int64
[documents + 1]: where each document starts, then the stream's length); `tokenizer.json`; and
`store.json`, the description below. With data.holdout=0 there is no split `heldout`. A store is
written beside its place and renamed into it, so it is there whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from ...sharding.keys import STRICT, user_path
from ..config import Config, DataConfig
from ..runtime.compile_cache import cache_folder
from .entropy import bigram_entropy, unigram_entropy
from .sources import fingerprint, split_texts
from .tokenizer import ByteTokenizer, Tokenizer, read_tokenizer, tokenizer_digest, train_bpe

VERSION = 3
SPLITS = ("train", "heldout")

REPORT = 10.0
"""Seconds between the lines that say how far tokenising is."""


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class SplitDescription:
    documents: Annotated[int, Field(gt=0)]
    tokens: Annotated[int, Field(gt=0)]
    largest_token: int


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Description:
    """store.json.

    made_from: every setting the content depends on, and the fingerprint. tokenizer_digest: of
    tokenizer.json. Entropies are those of the training split's counts, in nats per token: see
    entropy.py.
    """

    version: int = VERSION
    made_from: dict[str, Any]
    tokenizer: Literal["byte", "bpe"]
    tokenizer_digest: str
    vocab_size: int
    end_of_text: int
    dtype: Literal["<u2", "<u4"]
    train: SplitDescription
    heldout: SplitDescription | None
    unigram_entropy: float
    bigram_entropy: float | None


@dataclass(frozen=True)
class Split:
    """Tokens [T] and document offsets [documents + 1], memory-mapped; path is the token file's."""

    path: Path
    tokens: np.ndarray
    offsets: np.ndarray
    largest_token: int
    end_of_text: int


@dataclass(frozen=True)
class Store:
    """heldout: None where nothing is held out."""

    path: Path
    tokenizer: Tokenizer
    description: Description
    train: Split
    heldout: Split | None


def open_data(config: Config, tokenizer: Tokenizer | None = None) -> Store:
    """The store the config asks for, built if need be. tokenizer: that of the parameters there are
    already, see `build_store`.

    Raises ValueError as `build_store` does, and where it holds nothing out that train.eval_every
    could use, or does not fit model.vocab_size or train.seq_len.
    """
    store = open_store(build_store(config, tokenizer))
    if store.heldout is None and config.train.eval_every:
        raise ValueError(
            f"train.eval_every={config.train.eval_every}: {store.path} holds no documents out; "
            f"write train.eval_every=0"
        )
    check_fits(store, config)
    return store


def check_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Raises ValueError where the ids of the store in a folder are not those of `tokenizer`."""
    found, wanted = read_description(folder).tokenizer_digest, tokenizer_digest(tokenizer.text)
    if found != wanted:
        raise ValueError(
            f"data.store={folder} was made with a tokenizer of digest {found[:12]}, but the "
            f"parameters were trained with one of digest {wanted[:12]}; write another "
            f"data.store=…, for which the documents are tokenised anew"
        )


def check_fits(store: Store, config: Config) -> None:
    """Raises ValueError where the store does not fit model.vocab_size or train.seq_len."""
    vocabulary, seq_len = config.model.vocab_size, config.train.seq_len
    if store.tokenizer.vocab_size > vocabulary:
        raise ValueError(
            f"model.vocab_size={vocabulary} is smaller than the {store.description.tokenizer} "
            f"tokenizer's vocabulary; write model.vocab_size={store.tokenizer.vocab_size}"
        )
    for split in (store.train, store.heldout):
        if split is not None and split.largest_token >= vocabulary:
            raise ValueError(
                f"{split.path} holds token id {split.largest_token}, too large for "
                f"model.vocab_size={vocabulary}; write model.vocab_size={split.largest_token + 1}"
            )
    if len(store.train.tokens) <= seq_len:
        raise ValueError(
            f"train.seq_len={seq_len} needs {seq_len + 1} tokens for a row, the training split has "
            f"{len(store.train.tokens)}; give more text or write a smaller train.seq_len"
        )


def build_store(config: Config, tokenizer: Tokenizer | None = None) -> Path:
    """Folder of the config's store: data.store, or one in the user's cache; written if not there.
    tokenizer: what it is written with, and has to have been; default a new one of data.tokenizer,
    trained on its documents.

    Source files are read once for their fingerprint even if the store is there; data.source=store
    spares that. Of two processes that build one store the first to finish wins, both return it.
    Raises ValueError for bad input or a data.store made from something else or with another
    tokenizer, OSError with the path when the disk refuses.
    """
    data = config.data
    if data.source == "store":
        folder = user_path(str(data.store))
        if not folder.is_dir():
            raise ValueError(
                f"data.store={folder} is not a folder; "
                f"data.source=store opens what meshwright tokenize wrote"
            )
        if tokenizer is not None:
            check_tokenizer(folder, tokenizer)
        return folder
    if tokenizer is not None and tokenizer.kind != data.tokenizer:
        raise ValueError(
            f"data.tokenizer={data.tokenizer}, but the parameters were trained with a tokenizer "
            f"of kind {tokenizer.kind}; write data.tokenizer={tokenizer.kind}"
        )
    documents = _documents(data)
    made_from = documents | _trained(config)
    folder = _cached(made_from) if data.store is None else user_path(data.store)
    if tokenizer is not None and not (
        folder.exists()
        and read_description(folder).tokenizer_digest == tokenizer_digest(tokenizer.text)
    ):
        made_from = documents | _given(tokenizer)
        folder = _cached(made_from) if data.store is None else folder
    if not folder.exists():
        _write_store(config, made_from, folder, tokenizer)
    found = read_description(folder).made_from
    if tokenizer is None:
        _check_made_from(folder, found, made_from)
    else:  # its digest says more than how it came about
        check_tokenizer(folder, tokenizer)
        _check_made_from(folder, documents_of(found), documents)
    return folder


def documents_of(made_from: dict[str, Any]) -> dict[str, Any]:
    """What `made_from` says of the documents, without their tokenizer."""
    return {key: value for key, value in made_from.items() if key not in TOKENIZER_KEYS}


def _cached(made_from: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "data" / digest[:32]


def read_description(folder: Path) -> Description:
    """store.json of a folder. Raises ValueError where it is missing or of another version."""
    file = folder / "store.json"
    if not file.is_file():
        raise ValueError(f"{folder} is not a token store (no store.json); write another data.store")
    content = file.read_bytes()
    try:
        version = json.loads(content)["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{file} does not describe a token store; write another data.store"
        ) from error
    if version != VERSION:
        raise ValueError(
            f"{file} has version {version}, this Meshwright reads {VERSION}; "
            f"delete {folder} and build it again"
        )
    try:
        return TypeAdapter(Description).validate_json(content)
    except ValidationError as error:
        what = error.errors()[0]
        key = ".".join(map(str, what["loc"]))
        raise ValueError(
            f"{file}: {key}: {what['msg']}; delete {folder} and build it again"
        ) from error


def open_store(folder: Path) -> Store:
    """Maps a store's files. Raises ValueError naming one that is missing or damaged."""
    description = read_description(folder)
    tokenizer = _open_tokenizer(folder, description)
    train = _open_split(folder, "train", description, description.train)
    heldout = None
    if description.heldout is not None:
        heldout = _open_split(folder, "heldout", description, description.heldout)
    return Store(folder, tokenizer, description, train, heldout)


def describe_store(store: Store) -> str:
    """Lines for people: the folder, the tokenizer, and the size of each split."""
    lines = [
        f"store      {store.path}",
        f"tokenizer  {store.description.tokenizer}, {store.tokenizer.vocab_size} tokens",
    ]
    for name, split in zip(SPLITS, (store.train, store.heldout), strict=True):
        if split is None:
            lines.append(f"{name:<9}  nothing")
            continue
        lines.append(
            f"{name:<9}  {len(split.offsets) - 1:,} documents, {len(split.tokens):,} tokens, "
            f"{split.tokens.nbytes:,} bytes"
        )
    return "\n".join(lines)


TOKENIZER_KEYS = ("data.tokenizer", "model.vocab_size", "tokenizer")
"""Keys of `made_from` that say what the ids are, not what the documents are."""


def _documents(data: DataConfig) -> dict[str, Any]:
    settings = {
        "version": VERSION,
        "data.source": data.source,
        "data.holdout": data.holdout,
        "fingerprint": fingerprint(data),
    }
    return settings | ({"data.field": data.field} if data.source == "jsonl" else {})


def _trained(config: Config) -> dict[str, Any]:
    kind = {"data.tokenizer": config.data.tokenizer}
    trained = config.data.tokenizer == "bpe"
    return kind | ({"model.vocab_size": config.model.vocab_size} if trained else {})


def _given(tokenizer: Tokenizer) -> dict[str, Any]:
    return {"data.tokenizer": tokenizer.kind, "tokenizer": tokenizer_digest(tokenizer.text)}


def _check_made_from(folder: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    different = [key for key in wanted | found if found.get(key) != wanted.get(key)]
    if not different:
        return
    key = different[0]
    if key == "fingerprint":
        why = "from other documents"
    else:
        why = f"with {key}={found.get(key)}, not {wanted.get(key)}"
    raise ValueError(
        f"data.store={folder} was made {why}; write another data.store, delete that folder, "
        f"or write data.source=store to train on it as it is"
    )


def _write_store(
    config: Config, made_from: dict[str, Any], folder: Path, tokenizer: Tokenizer | None
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _temporary_folder(folder) as temporary:
        description = _write_files(config, made_from, temporary, tokenizer)
        if fingerprint(config.data) != made_from["fingerprint"]:
            raise ValueError("documents changed while they were tokenised; run again")
        (temporary / "store.json").write_text(json.dumps(asdict(description), indent=1))
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.exists():  # else another writer was faster; its store is checked as found
                raise


@contextmanager
def _temporary_folder(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, deleted at the end unless renamed. Disk errors get its name."""
    outer = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        # mkdtemp's folder is for its owner alone; the store gets the mode of the umask.
        inner = outer / folder.name
        inner.mkdir()
        yield inner
    except OSError as error:
        error.filename = error.filename or str(folder)
        raise
    finally:
        shutil.rmtree(outer, ignore_errors=True)


def _write_files(
    config: Config, made_from: dict[str, Any], folder: Path, tokenizer: Tokenizer | None
) -> Description:
    data = config.data
    if tokenizer is None:
        tokenizer = _new_tokenizer(config)
    (folder / "tokenizer.json").write_text(tokenizer.text, encoding="utf-8")
    dtype = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
    offsets = {split: array("q", [0]) for split in SPLITS}
    with ExitStack() as stack:
        streams = {
            split: stack.enter_context((folder / f"{split}.tokens").open("wb")) for split in SPLITS
        }
        for split, text in _reported(split_texts(data)):
            ids = np.append(tokenizer.encode(text), tokenizer.end_of_text).astype(dtype)
            streams[split].write(ids.tobytes())
            offsets[split].append(offsets[split][-1] + len(ids))
    _check_split(config, train=len(offsets["train"]) - 1, heldout=len(offsets["heldout"]) - 1)
    written = {}
    for split in SPLITS:
        if len(offsets[split]) == 1:
            (folder / f"{split}.tokens").unlink()
            continue
        np.save(folder / f"{split}.offsets.npy", np.asarray(offsets[split]))
        written[split] = _written_split(folder, split, dtype, tokenizer.end_of_text)
    train, heldout = written["train"], written.get("heldout")
    return Description(
        made_from=made_from,
        tokenizer=tokenizer.kind,
        tokenizer_digest=tokenizer_digest(tokenizer.text),
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        dtype=dtype,
        train=_describe_split(train),
        heldout=None if heldout is None else _describe_split(heldout),
        unigram_entropy=unigram_entropy(train),
        bigram_entropy=bigram_entropy(train),
    )


def _new_tokenizer(config: Config) -> Tokenizer:
    if config.data.tokenizer == "byte":
        return ByteTokenizer()
    size = config.model.vocab_size
    _say(f"training a BPE tokenizer of up to {size:,} tokens, which may take minutes")
    training = (text for split, text in split_texts(config.data) if split == "train")
    return train_bpe(training, size)


def _reported(texts: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """`texts`, with a line on stderr every REPORT seconds that they take."""
    last, characters = time.monotonic(), 0
    for number, (split, text) in enumerate(texts, 1):
        yield split, text
        characters += len(text)
        if time.monotonic() - last > REPORT:
            last = time.monotonic()
            _say(f"tokenised {number:,} documents, {characters:,} characters so far")


def _say(line: str) -> None:
    print(f"meshwright: {line}", file=sys.stderr, flush=True)


def _written_split(folder: Path, name: str, dtype: str, end_of_text: int) -> Split:
    path = folder / f"{name}.tokens"
    tokens, offsets = np.memmap(path, dtype, "r"), np.load(folder / f"{name}.offsets.npy")
    return Split(path, tokens, offsets, int(tokens.max()), end_of_text)


def _describe_split(split: Split) -> SplitDescription:
    return SplitDescription(
        documents=len(split.offsets) - 1,
        tokens=len(split.tokens),
        largest_token=split.largest_token,
    )


def _check_split(config: Config, train: int, heldout: int) -> None:
    """Raises ValueError unless documents stand on both sides."""
    data = config.data
    if train + heldout == 0:
        paths = f" data.paths=[{', '.join(data.paths)}]" if data.paths else ""
        raise ValueError(
            f"data.source={data.source}{paths}: empty corpus, no document has any text"
        )
    if heldout == 0 and data.holdout > 0:
        raise ValueError(
            f"data.holdout={data.holdout} holds out none of {train} documents; "
            f"write a larger share, split the text into more documents, or hold nothing out with "
            f"data.holdout=0 train.eval_every=0"
        )
    if train == 0:
        raise ValueError(
            f"data.holdout={data.holdout} leaves none of {heldout} documents for training; "
            f"write a smaller share or split the text into more documents"
        )


def _open_tokenizer(folder: Path, description: Description) -> Tokenizer:
    file = folder / "tokenizer.json"
    try:
        tokenizer = read_tokenizer(file.read_text(encoding="utf-8"), str(file))
        digest = tokenizer_digest(tokenizer.text)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read ({error}); build the store again") from None
    found = (tokenizer.vocab_size, tokenizer.end_of_text)
    said = (description.vocab_size, description.end_of_text)
    if found != said:
        raise ValueError(
            f"{folder}: the tokenizer has vocabulary size and end-of-text {found}, store.json says "
            f"{said}; delete {folder} and build it again"
        )
    if digest != description.tokenizer_digest:
        raise ValueError(
            f"{file} has digest {digest[:12]}, store.json says "
            f"{description.tokenizer_digest[:12]}; delete {folder} and build it again"
        )
    return tokenizer


def _open_split(folder: Path, name: str, whole: Description, said: SplitDescription) -> Split:
    file, offsets_file = folder / f"{name}.tokens", folder / f"{name}.offsets.npy"
    remedy = f"delete {folder} and build it again"
    for path in (file, offsets_file):
        if not path.is_file():
            raise ValueError(f"{path} is missing; {remedy}")
    size, expected = file.stat().st_size, said.tokens * np.dtype(whole.dtype).itemsize
    if size != expected:
        raise ValueError(f"{file} has {size} bytes where store.json says {expected}; {remedy}")
    try:
        offsets = np.load(offsets_file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{offsets_file} is damaged; {remedy}") from error
    if not (
        offsets.dtype == np.int64
        and offsets.shape == (said.documents + 1,)
        and (offsets[0], offsets[-1]) == (0, said.tokens)
        and (np.diff(offsets) > 0).all()
    ):
        raise ValueError(
            f"{offsets_file} does not cut {said.tokens} tokens into {said.documents} documents, "
            f"as store.json says; {remedy}"
        )
    tokens = np.memmap(file, whole.dtype, "r").view(np.ndarray)
    return Split(file, tokens, offsets.view(np.ndarray), said.largest_token, whole.end_of_text)
