"""The order of rows: a keyed permutation computed row by row, so a data position is one number.

A generalised Feistel network (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002)
on a grid a × b ≥ n, with cycle walking from the few cells past n. The hash is a step of
SplitMix64. Nothing comes from a random number library: the order of a run must outlive library
versions, and a golden test pins it.
"""

from __future__ import annotations

import math

import numpy as np

ROUNDS = 8


def permute(index: np.ndarray, n: int, seed: int, epoch: np.ndarray | int) -> np.ndarray:
    """Rows, int64 [k], at each index [k] of the permutation of n rows keyed by seed and epoch.

    0 ≤ index < n; epoch is an int or [k]. Within an epoch this is a bijection of range(n).
    """
    assert n >= 1
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    seeds = np.full(np.shape(index), seed % 2**64, np.uint64)
    key = _mix(_mix(seeds) + np.asarray(epoch, np.uint64))
    row = _feistel(np.asarray(index, np.uint64), a, b, key)
    while (outside := row >= n).any():
        row[outside] = _feistel(row[outside], a, b, key[outside])
    return row.astype(np.int64)


def _feistel(cell: np.ndarray, a: int, b: int, key: np.ndarray) -> np.ndarray:
    """Cells [k] of an a × b grid under keys [k]: each round shifts one coordinate by a hash of the
    other, which permutes the grid."""
    left, right = np.divmod(cell, np.uint64(b))
    for turn in range(0, ROUNDS, 2):
        left = (left + _mix(_mix(key + np.uint64(turn)) + right) % a) % a
        right = (right + _mix(_mix(key + np.uint64(turn + 1)) + left) % b) % b
    return left * np.uint64(b) + right


def _mix(x: np.ndarray) -> np.ndarray:
    """One step of SplitMix64 on uint64 [k], wrapping: a bijection that scatters neighbours."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
