"""Decoding with a KV cache: the model of `transformer.py` fed piece by piece, each piece attending
to all that came before it. Local code inside a `shard_map`.

Slot t of a row of the cache holds the token at position t, so causality alone tells written slots
from empty ones. A piece of one token cannot be cut over `tensor`: the layout is one without
sequence parallelism. Shapes: L layers, B sequences of this device, S tokens of a piece, T slots, K
kv heads of this device, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..sharding.layout import Layout
from ..sharding.linear import lookup
from .attention import causal_mask
from .attention_kernel import Tokens, attend_to
from .config import ModelConfig
from .moe import Routing
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
    router_bias: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    """Feed tokens [B, S] at positions [B, S], below 0: padding at a row's end, which leaves no
    trace. Returns logits [B, V] of the token after each row's last one, in f32, and the new cache.

    Scores [B, H, S, T] exist whole, so a long prompt comes in several pieces. Rows that are padding
    alone give logits without a meaning. router_bias [L, E]: of State. No expert's capacity is
    limited: pieces are shorter than routing groups.
    """
    assert not layout.sequence_parallel
    config = replace(config, capacity=None, routing_group=None, overflow="position")
    dense = config.dense_layers
    slots = cache.k.shape[3]
    real = positions >= 0
    row = jnp.arange(tokens.shape[0])[:, None]
    slot = jnp.where(real, positions, slots)  # past the end: written nowhere
    segments = jnp.where(real, 0, -1)
    tokens_at = Tokens(positions, segments)
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

        routing = Routing(router_bias).of_layer(number - dense)
        x, _, kept = block(
            p, x, segments, kernel, rotation, layout, config, number=number, routing=routing
        )
        return (x, kept), None

    with jax.named_scope("embed"):
        x = lookup(tokens, params.embed, layout, cache.k.dtype)
    # the cache is carried, not scanned over: its layers are then written in place
    numbers, state = jnp.arange(config.layers), (x, cache)
    if params.dense_blocks is not None:
        state, _ = lax.scan(layer, state, (numbers[:dense], params.dense_blocks))
    (x, cache), _ = lax.scan(layer, state, (numbers[dense:], params.blocks))
    with jax.named_scope("unembed"):
        last = jnp.maximum(jnp.sum(real, axis=1) - 1, 0)
        x, table = head(params, x[row[:, 0], last], config)
        logits = last_logits(x, table, layout, config.vocab_size, config.logit_softcap)
    return logits, cache
