"""What counting alone achieves, in nats per token: a trained model's loss is read against it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .store import Split

LARGEST_BIGRAM_VOCABULARY = 4096
"""A table of pairs for this many ids takes 128 MiB."""

CHUNK = 2**22
"""Tokens counted at a time."""


def unigram_entropy(split: Split) -> float:
    """H(token) of the split's own counts."""
    size = split.largest_token + 1
    counts = np.zeros(size, np.int64)
    for start in range(0, len(split.tokens), CHUNK):
        counts += np.bincount(split.tokens[start : start + CHUNK], minlength=size)
    return _entropy(counts)


def bigram_entropy(split: Split) -> float | None:
    """H(next | token) of the split's own counts within documents; None beyond 4,096 ids."""
    size = split.largest_token + 1
    if size > LARGEST_BIGRAM_VOCABULARY:
        return None
    pairs = np.zeros(size * size, np.int64)
    for start in range(0, len(split.tokens) - 1, CHUNK):
        window = split.tokens[start : start + CHUNK + 1].astype(np.int64)
        token, following = window[:-1], window[1:]
        inside = token != split.end_of_text
        pairs += np.bincount(token[inside] * size + following[inside], minlength=size * size)
    return _entropy(pairs) - _entropy(pairs.reshape(size, size).sum(axis=1))


def _entropy(counts: np.ndarray) -> float:
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())
