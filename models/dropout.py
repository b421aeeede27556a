"""Dropout (arXiv 1207.0580) as a function of what is dropped, never of where it is computed.

Whether a channel of a token is dropped follows from (seed, data position of its row, layer, site,
token of the row, channel): so masks are the same bits on every mesh, in any micro-batches, in a
recomputation and after a resume, and no two rows, layers or shards share one. A row, layer and site
have a key of 64 bits from JAX's generator; elements, up to 2³² of them, have bits from a hash of it
that is ours, since the generator's depend on the shape that a device asks for, and cost several
times more. The backward pass hashes again: no mask is ever saved. Shapes: B rows, S tokens, D
channels.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..sharding.collectives import axis_index
from ..sharding.context import token_at
from ..sharding.layout import Layout

EMBEDDING, MIXER, FFN, ROUTER = range(4)
"""Sites: the embedding's output, what each half of a layer adds to the residual stream, and the
router's second choice.
"""


GENERATOR = "threefry2x32"


class Dropout(NamedTuple):
    """What is left to chance in a micro-batch."""

    rate: float
    """probability of zero; 0 where only the router is left to chance"""
    rows: jax.Array
    """uint32 [B, 2], the words of each row's key: plain data, which a pipeline keeps with all else
    that its backward pass needs"""


def row_keys(seed: int, positions: jax.Array) -> jax.Array:
    """Words of the keys, uint32 [B, 2], of the rows at data positions [B, 2], see `position.py`."""
    seed_key = jax.random.key(seed, impl=GENERATOR)

    def row_key(position: jax.Array) -> jax.Array:
        low, high = position
        key = jax.random.fold_in(seed_key, low)
        beyond = jax.random.key_data(jax.random.fold_in(key, high))
        return jnp.where(high > 0, beyond, jax.random.key_data(key))  # the first 2³² rows need one

    return jax.vmap(row_key)(positions)


def drop(
    x: jax.Array, dropout: Dropout | None, layer: jax.Array | int, site: int, layout: Layout
) -> jax.Array:
    """x[B, S_{context,tensor}, D], each element zero with probability `rate`, else divided by the
    probability of the rest. None drops nothing.
    """
    if dropout is None or dropout.rate == 0:
        return x

    return _drop(x, _words(dropout.rows, layer, site), dropout.rate, layout)


def chances(
    rows: jax.Array, tokens: int, layer: jax.Array | int, site: int, layout: Layout
) -> jax.Array:
    """Numbers in [0, 1), [B, S_{context,tensor}], one for each of this device's S tokens."""
    bits = _bits(_words(rows, layer, site), tokens, 1, layout)[..., 0]
    return (bits >> 8).astype(jnp.float32) / 2**24


def _words(rows: jax.Array, layer: jax.Array | int, site: int) -> jax.Array:
    """uint32 [B, 2] of each row's key."""

    def words(row: jax.Array) -> jax.Array:
        row = jax.random.wrap_key_data(row, impl=GENERATOR)
        return jax.random.bits(jax.random.fold_in(jax.random.fold_in(row, layer), site), (2,))

    return jax.vmap(words)(rows)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _drop(x: jax.Array, words: jax.Array, rate: float, layout: Layout) -> jax.Array:
    """Linear in x, and its own transpose. words: uint32 [B, 2]."""
    kept = _bits(words, x.shape[1], x.shape[2], layout) >= np.uint32(rate * 2**32)
    return jnp.where(kept, x.astype(jnp.float32) / (1.0 - rate), 0.0).astype(x.dtype)


def _drop_forward(x, words, rate, layout):
    return _drop(x, words, rate, layout), words


def _drop_backward(rate, layout, words, dy):
    return _drop(dy, words, rate, layout), None


_drop.defvjp(_drop_forward, _drop_backward)


def _bits(words: jax.Array, tokens: int, channels: int, layout: Layout) -> jax.Array:
    """uint32 [B, S, D] by the rows' words."""
    token = _tokens_of_row(tokens, layout)
    element = token[:, None] * np.uint32(channels) + jnp.arange(channels, dtype=jnp.uint32)[None]
    key = words[:, :, None, None]
    return _mix(_mix(element[None] ^ key[:, 0]) ^ key[:, 1])


def _tokens_of_row(tokens: int, layout: Layout) -> jax.Array:
    """The row's numbers, uint32, of this device's `tokens` of it."""
    part, parts = axis_index("context", layout), layout.size("context")
    if layout.config.sequence_parallel:
        part = part * layout.size("tensor") + axis_index("tensor", layout)
        parts *= layout.size("tensor")
    place = jnp.asarray(part * tokens, jnp.uint32) + jnp.arange(tokens, dtype=jnp.uint32)
    return token_at(place, parts * tokens, layout)


def _mix(word: jax.Array) -> jax.Array:
    """MurmurHash3's finaliser, a bijection of uint32 in which each bit moves about half of all."""
    word = (word ^ (word >> 16)) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * np.uint32(0xC2B2AE35)
    return word ^ (word >> 16)
