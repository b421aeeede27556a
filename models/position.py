"""The data position: how many rows a run has consumed. Long runs count beyond 2³², and JAX computes
with integers of 32 bits, so on devices a position is two words: uint32 [2], low and high.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

WORD = 2**32


def position_words(position: int) -> np.ndarray:
    """uint32 [2] of a position, 0 ≤ position < 2⁶⁴."""
    assert 0 <= position < WORD**2
    return np.array([position % WORD, position // WORD], np.uint32)


def position_number(words: jax.Array | np.ndarray) -> int:
    """The position whose words [2] these are."""
    low, high = np.asarray(words).tolist()
    return low + high * WORD


def advance(words: jax.Array, rows: jax.Array | int) -> jax.Array:
    """uint32 [..., 2]: the positions that lie `rows` [...] after the one with `words` [2]; rows are
    below 2³².
    """
    rows = jnp.asarray(rows).astype(jnp.uint32)
    low = words[0] + rows  # wraps
    return jnp.stack([low, words[1] + (low < rows).astype(jnp.uint32)], axis=-1)
