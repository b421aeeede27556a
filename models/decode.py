"""Decoding with a cache: the model of `transformer.py` fed piece by piece, each piece seeing all
that came before it. Local code inside a `shard_map`.

Slot t of a row of the cache holds the token at position t, so causality alone tells written slots
from empty ones. A piece of one token cannot be cut over `tensor`: the layout is one without
sequence parallelism. Shapes: B sequences of this device, S tokens of a piece, T slots, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..sharding.layout import Layout
from ..sharding.linear import lookup
from . import pattern
from .config import ModelConfig
from .dropout import FFN, MIXER
from .inputs import LayerInputs, Writing
from .kernels.attention import Tokens
from .layers.kinds import KINDS
from .pattern import Layer
from .transformer import Layers, Transformer, all_rotations, half, head, of_layer, place_of
from .vocab import last_logits

Cache = dict[str, Any]
"""By kind what its n layers cache of every token so far, a tree of [n, B, ...] in the compute
dtype; kinds that cache nothing are left out.
"""


def empty_cache(rows: int, slots: int, layout: Layout, config: ModelConfig, dtype: Any) -> Cache:
    """For B = `rows` and T = `slots`."""
    caches = {
        kind: KINDS[kind].cache(config, len(numbers), rows, slots, layout, dtype)
        for kind, numbers in pattern.held(config).items()
    }
    return {kind: cache for kind, cache in caches.items() if cache is not None}


def extend(
    params: Transformer,
    cache: Cache,
    tokens: jax.Array,
    positions: jax.Array,
    slots: int,
    layout: Layout,
    config: ModelConfig,
    dtype: Any,
    buffers: Mapping[str, Any] | None = None,
) -> tuple[jax.Array, Cache]:
    """Feed tokens [B, S] at positions [B, S], below 0: padding at a row's end, which leaves no
    trace. Returns logits [B, V] of the token after each row's last one, in f32, and the new cache.

    slots: T. Rows that are padding alone give logits without a meaning. buffers: of State.
    """
    assert not layout.config.sequence_parallel
    real = positions >= 0
    segments = jnp.where(real, 0, -1)
    rows = jnp.arange(tokens.shape[0])[:, None]
    at = Tokens(positions, segments)
    inputs = LayerInputs(
        config=config,
        layout=layout,
        segments=segments,
        everywhere=at,
        rotations=all_rotations(positions, config),
        buffers=buffers,
        writing=Writing(
            rows,
            jnp.where(real, positions, slots),
            at,
            Tokens(jnp.arange(slots)[None], jnp.zeros((1, slots), jnp.int32)),
        ),
    )
    with jax.named_scope("embed"):
        x = lookup(tokens, params.embed, layout, dtype)
    x, cache = _extend_layers(params.layers, x, cache, inputs)
    with jax.named_scope("unembed"):
        last = jnp.maximum(jnp.sum(real, axis=1) - 1, 0)
        x, table = head(params, x[rows[:, 0], last], config)
        logits = last_logits(x, table, layout, config.vocab_size, config.logit_softcap)
    return logits, cache


def _extend_layers(
    p: Layers, x: jax.Array, cache: Cache, inputs: LayerInputs
) -> tuple[jax.Array, Cache]:
    """Layers whose kinds repeat are one scan over repeats. Parameters and cache are indexed in it,
    not scanned over: so the cache's layers are written in place.
    """
    layers = pattern.layers(inputs.config)
    state = x, cache
    for first, repeats, period in pattern.segments(layers):

        def one_repeat(
            state: tuple[jax.Array, Cache], number: jax.Array, first=first, period=period
        ) -> tuple[tuple[jax.Array, Cache], None]:
            for place in range(first, first + period):
                layer, at = layers[place], number * period + place
                state = _extend_layer(p, *state, layer, of_layer(inputs, at, layer))
            return state, None

        state, _ = lax.scan(one_repeat, state, jnp.arange(repeats))
    return state


def _extend_layer(
    p: Layers, x: jax.Array, cache: Cache, layer: Layer, inputs: LayerInputs
) -> tuple[jax.Array, Cache]:
    cache = dict(cache)
    for kind, site in zip(layer.kinds, (MIXER, FFN), strict=True):
        place = place_of(kind, inputs.config)[inputs.number]
        own = jax.tree.map(lambda a, place=place: a[place], getattr(p, kind))
        extend = KINDS[kind].extend
        if extend is None:
            x, _ = half(own, x, partial(KINDS[kind].apply, layer=layer), kind, site, inputs)
            continue
        run = partial(extend, layer=layer, cache=cache.get(kind), place=place)
        x, kept = half(own, x, run, kind, site, inputs)
        if kind in cache:
            cache[kind] = kept
    return x, cache
