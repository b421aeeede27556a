"""Decoding with a KV cache: the model of `transformer.py` fed piece by piece, each piece attending
to all that came before it. Local code inside a `shard_map`.

Slot t of a row of the cache holds the token at position t, so causality alone tells written slots
from empty ones. A piece of one token cannot be cut over `tensor`: the layout is one without
sequence parallelism. Shapes: L layers, B sequences of this device, S tokens of a piece, T slots, K
kv heads of this device, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..sharding.layout import Layout
from ..sharding.linear import lookup
from .attention import causal_mask
from .attention_kernel import Tokens, attend_to
from .config import ModelConfig
from .rope import rotations
from .transformer import Block, Transformer, block, head
from .vocab import last_logits


class Cache(NamedTuple):
    """Keys, turned by their positions, and values of every token so far, each [L, B, K, T,
    head_dim] in the compute dtype.
    """

    k: jax.Array
    v: jax.Array


def empty_cache(rows: int, slots: int, layout: Layout, config: ModelConfig, dtype: Any) -> Cache:
    kv_heads = (layout.resolved.kv_copies or config.num_kv_heads) // layout.size("tensor")
    shape = (config.layers, rows, kv_heads, slots, config.size_per_head)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def extend(
    params: Transformer,
    cache: Cache,
    tokens: jax.Array,
    positions: jax.Array,
    layout: Layout,
    config: ModelConfig,
) -> tuple[jax.Array, Cache]:
    """Feed tokens [B, S] at positions [B, S], below 0: padding at a row's end, which leaves no
    trace. Returns logits [B, V] of the token after each row's last one, in f32, and the new cache.

    Scores [B, H, S, T] exist whole, so a long prompt comes in several pieces. Rows that are padding
    alone give logits without a meaning.
    """
    assert not layout.sequence_parallel
    slots = cache.k.shape[3]
    real = positions >= 0
    row = jnp.arange(tokens.shape[0])[:, None]
    slot = jnp.where(real, positions, slots)  # past the end: written nowhere
    tokens_at = Tokens(positions, jnp.where(real, 0, -1))
    slots_at = Tokens(jnp.arange(slots)[None], jnp.zeros((1, slots), jnp.int32))
    rotation = rotations(positions, config)
    mask = causal_mask(config)

    def layer(state: tuple[jax.Array, Cache], numbered: tuple[jax.Array, Block]):
        x, cache = state
        number, p = numbered

        def kernel(
            q: jax.Array, k: jax.Array, v: jax.Array, sink: jax.Array | None
        ) -> tuple[jax.Array, Cache]:
            kept = Cache(
                cache.k.at[number, row, :, slot].set(k, mode="drop"),
                cache.v.at[number, row, :, slot].set(v, mode="drop"),
            )
            o = attend_to(q, kept.k[number], kept.v[number], tokens_at, slots_at, mask, sink)
            return o, kept

        return block(p, x, kernel, rotation, layout, config), None

    with jax.named_scope("embed"):
        x = lookup(tokens, params.embed, layout, cache.k.dtype)
    # the cache is carried, not scanned over: its layers are then written in place
    (x, cache), _ = lax.scan(layer, (x, cache), (jnp.arange(config.layers), params.blocks))
    with jax.named_scope("unembed"):
        last = jnp.maximum(jnp.sum(real, axis=1) - 1, 0)
        x, table = head(params, x[row[:, 0], last], config)
        logits = last_logits(x, table, layout, config.vocab_size, config.logit_softcap)
    return logits, cache
