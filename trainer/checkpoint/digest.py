"""A number that tells whether an array is still the same, on any mesh and on none.

The digest of a leaf is the sum over its logical elements of word × weight(index) modulo 2³²: `word`
the element's bits as uint32, `index` its place in row-major order modulo 2³², `weight` an odd hash
of it. A sum does not care how the array is cut, so every layout gives the same number, and each
device adds up what it holds. Weights are odd, so no single flipped bit goes unseen; other damage
does with probability 2⁻³².
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

CHUNK = 1 << 20
"""Elements that `host_digest` holds at a time."""


@jax.jit
def digests(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The digest, uint32 [], of every leaf, whatever its sharding. Moves 4 bytes a leaf."""
    return {name: _digest(leaf) for name, leaf in leaves.items()}


def _digest(leaf: jax.Array) -> jax.Array:
    leaf = leaf.astype(jnp.uint8) if leaf.dtype == bool else leaf
    unsigned = f"uint{8 * leaf.dtype.itemsize}"
    word = lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
    index = jnp.zeros(leaf.shape, jnp.uint32)
    for dim in range(leaf.ndim):
        stride = np.uint32(math.prod(leaf.shape[dim + 1 :]) % 2**32)
        index += lax.broadcasted_iota(jnp.uint32, leaf.shape, dim) * stride
    return jnp.sum(word * _weight(index), dtype=jnp.uint32)


def host_digest(leaf: np.ndarray) -> int:
    """The same number from an array in host memory, without a device."""
    words = leaf.reshape(-1)
    words = words.view(f"uint{8 * words.dtype.itemsize}")
    total = 0
    for start in range(0, words.size, CHUNK):
        word = words[start : start + CHUNK].astype(np.uint32)
        index = np.arange(start, start + word.size).astype(np.uint32)
        total += int(np.sum(word * _weight(index), dtype=np.uint32))
    return total % 2**32


def _weight(index):
    """An odd hash of uint32: MurmurHash3's finaliser, with its last bit set."""
    index = (index ^ (index >> 16)) * np.uint32(0x85EBCA6B)
    index = (index ^ (index >> 13)) * np.uint32(0xC2B2AE35)
    return (index ^ (index >> 16)) | np.uint32(1)
