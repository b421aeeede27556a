"""Text to token ids and back: bytes, or byte-level BPE trained on the corpus.

A document ends with an id of its own, `end_of_text`, which `encode` never gives, whatever the text.
A tokenizer is kept as a file `tokenizer.json` in token stores, run folders and checkpoints: a BPE
in the format of the `tokenizers` library, bytes as `{"type": "bytes"}`. Two tokenizers are the same
where the digests of those files' contents are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

END_OF_TEXT = "<|endoftext|>"

LONGEST_PIECE = 256
"""Most bytes of text in which BPE looks for merges. Text falls into pieces at blanks and where
letters, digits and other characters meet; the longest in Python's standard library has 96 bytes.
"""


class Tokenizer(Protocol):
    """kind: as in data.tokenizer. text: of its tokenizer.json."""

    @property
    def kind(self) -> Literal["byte", "bpe"]: ...

    @property
    def text(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_text(self) -> int: ...

    def encode(self, text: str) -> np.ndarray:
        """Token ids [n], without end-of-text."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """Text of ids [n]; end-of-text gives nothing, bytes that are not UTF-8 give U+FFFD.

        Raises ValueError for an id outside the vocabulary, as the model's padded rows are.
        """
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """Ids 0..255 are the bytes of UTF-8, 256 is end-of-text."""

    kind: Literal["byte"] = "byte"
    text: str = '{"type": "bytes"}'
    vocab_size: int = 257
    end_of_text: int = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids: np.ndarray) -> str:
        ids = _known(ids, self.vocab_size)
        return ids[ids != self.end_of_text].astype(np.uint8).tobytes().decode(errors="replace")


@dataclass(frozen=True)
class BpeTokenizer:
    """A byte-level BPE of the `tokenizers` library: any text round-trips."""

    model: HuggingFaceTokenizer
    end_of_text: int
    text: str = field(repr=False)
    kind: Literal["bpe"] = "bpe"

    @property
    def vocab_size(self) -> int:
        return self.model.get_vocab_size()

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.model.encode(text).ids, np.uint32)

    def decode(self, ids: np.ndarray) -> str:
        return self.model.decode(_known(ids, self.vocab_size).tolist())


def train_bpe(texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
    """Byte-level BPE with at most `vocab_size` ids; fewer where the texts give no more merges.

    Pieces longer than LONGEST_PIECE are cut, here and when the tokenizer encodes: the time that a
    merge takes grows with the square of a piece's length, and a text without blanks may be one.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    assert vocab_size > 256, "every byte, and end-of-text"
    model = Tokenizer(models.BPE())
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bounded = pre_tokenizers.FixedLength(length=LONGEST_PIECE)
    model.pre_tokenizer = pre_tokenizers.Sequence([pieces, bounded])
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return _bpe(model, model.to_str())


def read_tokenizer(text: str, origin: str) -> Tokenizer:
    """The tokenizer whose tokenizer.json holds `text`. Raises ValueError naming `origin` where it
    holds none.
    """
    from tokenizers import Tokenizer

    try:
        if json.loads(text) == json.loads(ByteTokenizer.text):
            return ByteTokenizer()
        return _bpe(Tokenizer.from_str(text), text)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{origin} is not a readable tokenizer ({error})") from error


def tokenizer_digest(text: str) -> str:
    """SHA-256 of what a tokenizer.json says, however it is laid out."""
    return hashlib.sha256(json.dumps(json.loads(text), sort_keys=True).encode()).hexdigest()


def _bpe(model: HuggingFaceTokenizer, text: str) -> BpeTokenizer:
    # A text that contains "<|endoftext|>" must not end its document. No file keeps this setting.
    model.encode_special_tokens = True
    end_of_text = model.token_to_id(END_OF_TEXT)
    if end_of_text is None:
        raise ValueError(f"no token {END_OF_TEXT}")
    return BpeTokenizer(model, end_of_text, text)


def _known(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    ids = np.asarray(ids, np.int64).reshape(-1)
    unknown = ids[(ids < 0) | (ids >= vocab_size)]
    if unknown.size:
        raise ValueError(f"token id {unknown[0]} is outside the vocabulary of {vocab_size} tokens")
    return ids
