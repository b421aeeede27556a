"""Rows of a split: its stream of documents cut at multiples of S = seq_len tokens.

Documents are packed: several may share a row and one may span many rows. Segment ids, positions
and weights keep them apart.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .store import Split


class Rows(NamedTuple):
    """Arrays [n, S]. See `models.batch.Batch`, which holds the same on devices."""

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    positions: np.ndarray
    segments: np.ndarray


def row_count(split: Split, seq_len: int, *, partial: bool = False) -> int:
    """Rows whose every token has a next one in the stream; `partial`: the shorter last row too."""
    pairs = len(split.tokens) - 1
    return -(-pairs // seq_len) if partial else pairs // seq_len


def rows_at(split: Split, rows: np.ndarray, seq_len: int) -> Rows:
    """Rows by number [n]: row i is stream[i·S : i·S + S], its targets are one token further.

    A document's last token has no target: weight 0, target 0. Segments count the documents of a
    row from 0; positions count tokens from the document's start or the row's, whichever is later.
    Past the stream's end, and so in any row beyond the last, stands padding: segment -1, the rest
    0. Integers are int32, weights float32.

    Raises ValueError where tokens contradict the store's own description: the file is damaged.
    """
    length = len(split.tokens)
    place = np.asarray(rows, np.int64)[:, None] * seq_len + np.arange(seq_len)
    real = place < length
    place = np.minimum(place, length - 1)
    tokens = split.tokens[place]
    document = np.searchsorted(split.offsets, place, side="right") - 1
    last = place + 1 == split.offsets[document + 1]
    _check(split, place, tokens, last)

    weights = real & ~last
    targets = split.tokens[np.minimum(place + 1, length - 1)]
    positions = place - np.maximum(split.offsets[document], place[:, :1])
    segments = document - document[:, :1]
    return Rows(
        tokens=np.where(real, tokens, 0).astype(np.int32),
        targets=np.where(weights, targets, 0).astype(np.int32),
        weights=weights.astype(np.float32),
        positions=np.where(real, positions, 0).astype(np.int32),
        segments=np.where(real, segments, -1).astype(np.int32),
    )


def _check(split: Split, place: np.ndarray, tokens: np.ndarray, last: np.ndarray) -> None:
    if (beyond := tokens > split.largest_token).any():
        raise ValueError(
            f"{split.path}: token id {tokens[beyond][0]} at token {place[beyond][0]} is beyond the "
            f"largest of store.json, {split.largest_token}: the store is damaged, build it again"
        )
    if (wrong := (tokens == split.end_of_text) != last).any():
        raise ValueError(
            f"{split.path}: end-of-text and document offsets disagree at token {place[wrong][0]}: "
            "the store is damaged, build it again"
        )
