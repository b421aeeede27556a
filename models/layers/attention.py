"""The attention sublayer: projections by heads, RoPE, the kernel, the output projection. Layers may
differ in their window and in their RoPE, or have none.

Heads are cut over `tensor` (Megatron, arXiv 1909.08053); grouped queries (2305.13245) share kv
heads. Where kv heads are fewer than tensor shards, `linear` hands each shard the ones its queries
need. Shapes: H query heads, K kv heads; B sequences, S tokens, T slots of a cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ...sharding import context
from ...sharding.layout import Layout
from ...sharding.linear import entrance_sent, exit_sent, linear
from ...sharding.traffic import ALL_REDUCE, LayerRuns, Traffic, ring
from .. import init
from ..config import ModelConfig
from ..inputs import LayerInputs
from ..kernels.attention import Mask, attend_to, block_kernel
from ..norms import rms_norm, rms_norm_over_heads
from ..pattern import Layer
from ..rope import rotate
from .sublayer import Kind, Sublayer


class Attention(Sublayer):
    """q [D, H, head_dim], k, v [D, K, head_dim], o [H, head_dim, D], their biases; the norms of
    queries and keys, [head_dim] or, over all heads at once, [H or K, head_dim]; gate like q; sink
    [H].
    """

    def __init__(self, config: ModelConfig, key: jax.Array):
        super().__init__(config)
        d, h, k, size = config.d_model, config.heads, config.num_kv_heads, config.size_per_head
        q_axes, kv_axes = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")
        self.q = init.matrix(key, config, "attention.q", q_axes, (d, h, size), fan_in=d)
        self.k = init.matrix(key, config, "attention.k", kv_axes, (d, k, size), fan_in=d)
        self.v = init.matrix(key, config, "attention.v", kv_axes, (d, k, size), fan_in=d)
        self.o = init.matrix(
            key,
            config,
            "attention.o",
            ("heads", "head_dim", "embed"),
            (h, size, d),
            fan_in=h * size,
            residual=True,
        )
        biased = config.bias in ("qkv", "all")
        self.q_bias = init.bias(q_axes[1:], (h, size)) if biased else None
        self.k_bias = init.bias(kv_axes[1:], (k, size)) if biased else None
        self.v_bias = init.bias(kv_axes[1:], (k, size)) if biased else None
        self.o_bias = init.bias(("channel",), (d,)) if config.bias == "all" else None
        q_norm, k_norm = {
            None: (None, None),
            "head": (init.scale(("head_dim",), (size,)), init.scale(("head_dim",), (size,))),
            "all": (init.scale(q_axes[1:], (h, size)), init.scale(kv_axes[1:], (k, size))),
        }[config.qk_norm]
        self.q_norm, self.k_norm = q_norm, k_norm
        gate = init.matrix(key, config, "attention.gate", q_axes, (d, h, size), fan_in=d)
        self.gate = gate if config.attention_gate else None
        self.sink = init.bias(("heads",), (h,)) if config.attention_sink else None


class Projected(NamedTuple):
    """Of a device's heads: q, gate [B, S, H, head_dim] and k, v [B, S, K, head_dim], normed and
    turned by their positions.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    gate: jax.Array | None


def project(p: Attention, x: jax.Array, layer: Layer, inputs: LayerInputs) -> Projected:
    """x[B, S_{context,tensor}, D] -> the heads of this device."""
    config, layout = inputs.config, inputs.layout
    weights, biases = [p.q, p.k, p.v], [p.q_bias, p.k_bias, p.v_bias]
    if p.gate is not None:
        weights, biases = [*weights, p.gate], [*biases, None]
    q, k, v, *gate = linear(
        x,
        weights,
        layout,
        biases=biases,
        enter="tensor",
        input_name="attention.norm",
        name="attention.qkv",
    )
    if p.q_norm is not None and p.k_norm is not None:
        norm = partial(rms_norm, eps=config.norm_eps)
        if config.qk_norm == "all":
            norm = partial(rms_norm_over_heads, eps=config.norm_eps, layout=layout)
        q, k = norm(q, p.q_norm), norm(k, p.k_norm)
    if layer.rope is not None:
        rotation = inputs.rotations[layer.rope, config.size_per_head]
        q, k = rotate(q, rotation), rotate(k, rotation)
    return Projected(q, k, v, gate[0] if gate else None)


def leave(
    o: jax.Array,
    gate: jax.Array | None,
    weight: nnx.Param,
    bias: nnx.Param | None,
    layout: Layout,
) -> jax.Array:
    """o[B, S_context, H, head_dim] of this device's heads -> [B, S_{context,tensor}, D]."""
    if gate is not None:
        o = o * jax.nn.sigmoid(gate)
    return linear(o, weight, layout, biases=(bias,), leave="tensor", name="attention.out")


def mask_of(layer: Layer, config: ModelConfig) -> Mask:
    return Mask(causal=True, window=layer.window, softcap=config.attention_softcap)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sink: jax.Array | None,
    layer: Layer,
    inputs: LayerInputs,
) -> jax.Array:
    """q[B, S_context, H, ...], k, v[B, S_context, K, ...] of this device's heads -> what queries
    make of the values of all tokens that they see, [B, S_context, H, width of v].
    """
    config, layout = inputs.config, inputs.layout
    consecutive = context.consecutive(q.shape[1], layout)
    kernel = block_kernel(mask_of(layer, config), consecutive, config.attention_block)
    return context.attend(q, k, v, inputs.everywhere, kernel, layout, sink)


def _apply(p: Attention, x: jax.Array, layer: Layer, inputs: LayerInputs) -> tuple[jax.Array, None]:
    q, k, v, gate = project(p, x, layer, inputs)
    o = attend(q, k, v, None if p.sink is None else p.sink[...], layer, inputs)
    return leave(o, gate, p.o, p.o_bias, inputs.layout), None


class Cache(NamedTuple):
    """Keys, turned by their positions, and values of every token so far, each [n, B, K, T,
    head_dim] in the compute dtype.
    """

    k: jax.Array
    v: jax.Array


def _cache(
    config: ModelConfig, count: int, rows: int, slots: int, layout: Layout, dtype: Any
) -> Cache:
    kv_heads = (layout.resolved.kv_copies or config.num_kv_heads) // layout.size("tensor")
    shape = (count, rows, kv_heads, slots, config.size_per_head)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def _extend(
    p: Attention, x: jax.Array, layer: Layer, inputs: LayerInputs, cache: Cache, place: jax.Array
) -> tuple[jax.Array, Cache]:
    """Scores [B, H, S, T] exist whole, so a long prompt comes in several pieces."""
    writing = inputs.writing
    assert writing is not None
    q, k, v, gate = project(p, x, layer, inputs)
    at = (place, writing.rows, slice(None), writing.slots)
    cache = Cache(cache.k.at[at].set(k, mode="drop"), cache.v.at[at].set(v, mode="drop"))
    sink = None if p.sink is None else p.sink[...]
    mask = mask_of(layer, inputs.config)
    o = attend_to(q, cache.k[place], cache.v[place], writing.tokens, writing.cached, mask, sink)
    return leave(o, gate, p.o, p.o_bias, inputs.layout), cache


def visible_pairs(tokens: int, window: int | None) -> float:
    """(query, key) pairs of a causal row that attention looks at; documents hide more."""
    window = min(window or tokens, tokens)
    return window * (window + 1) / 2 + (tokens - window) * window


def _flops(config: ModelConfig, layer: Layer, tokens: int) -> float:
    heads = config.heads * (2 + config.attention_gate) + 2 * config.num_kv_heads
    weights = config.d_model * heads * config.size_per_head
    pairs = visible_pairs(tokens, layer.window)
    return 2 * weights * tokens + 4 * config.heads * config.size_per_head * pairs


def _sent(config: ModelConfig, layer: Layer, runs: LayerRuns, layout: Layout) -> Iterator[Traffic]:
    yield from entrance_sent(config.d_model, runs, layout)
    yield from exit_sent(config.d_model, runs, layout, again=exit_again(config, runs))
    if config.qk_norm == "all":
        # one mean square of each token for queries and one for keys, and their derivatives
        sums = 2 * 4 * runs.tokens(layout) * (2 * runs.passes + runs.again)
        yield ring("norms over heads", ALL_REDUCE, ["tensor"], sums, layout)
    kv_heads = layout.resolved.kv_copies or config.num_kv_heads
    widths = config.size_per_head, config.size_per_head
    yield from context.sent(config.heads, kv_heads, *widths, runs, layout)


def exit_again(config: ModelConfig, runs: LayerRuns) -> float:
    """How often a recomputation makes attention's exit again: what it gives is read by the norm of
    what follows, and so by the backward pass.
    """
    return 0 if "attention.out" in runs.saved else runs.again


ATTENTION = Kind(
    scope="attention",
    params=Attention,
    apply=_apply,
    flops=_flops,
    sent=_sent,
    rotary_width=lambda config: config.size_per_head,
    cache=_cache,
    extend=_extend,
)
