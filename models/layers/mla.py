"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434; V3, 2412.19437): keys and values of
all heads are made of one latent a token, queries of another, both normed; RoPE turns some channels
of each query and one further key, which all heads share.

Latents are computed for a device's own tokens, by matrices that tensor does not cut; what enters
the heads, which tensor does cut, is the latents, narrower than the residual stream. Decoding caches
the latent and the shared key, and has the matrices that make keys and values of a latent multiply
the queries and the output instead. Shapes: H heads, Rq and Rk ranks of the latents, N, P, E
channels of a head's queries without RoPE, with it, and of its values; B sequences, S tokens, T
slots of a cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ...sharding import context
from ...sharding.collectives import all_gather
from ...sharding.layout import Layout
from ...sharding.linear import SEQUENCE, by_head, entrance_sent, exit_sent, linear
from ...sharding.traffic import ALL_GATHER, REDUCE_SCATTER, LayerRuns, Traffic, ring
from .. import init
from ..config import ModelConfig
from ..inputs import LayerInputs
from ..kernels.attention import attend_to
from ..norms import rms_norm
from ..pattern import Layer
from ..rope import rotate, temperature
from .attention import attend, exit_again, leave, mask_of, visible_pairs
from .sublayer import Kind, Sublayer


class Mla(Sublayer):
    """q_down [D, Rq] and q_up [Rq, H, N+P], or q [D, H, N+P] where queries have no latent; kv_down
    [D, Rk+P], the latent and the shared key; k_up [Rk, H, N], v_up [Rk, H, E]; o [H, E, D]; norms
    of the latents; gate [D, H, E]; sink [H].
    """

    def __init__(self, config: ModelConfig, key: jax.Array):
        super().__init__(config)
        mla, d, h = config.mla, config.d_model, config.heads
        rank = mla.kv_rank
        assert rank is not None
        width, values = mla.nope_dim + mla.rope_dim, mla.value_dim
        up = ("latent", "heads", "head_dim")

        def matrix(name: str, axes: tuple[str, ...], *shape: int) -> nnx.Param:
            return init.matrix(key, config, f"mla.{name}", axes, shape, fan_in=shape[0])

        whole, latent = mla.q_rank is None, mla.q_rank or 0
        heads = ("embed", "heads", "head_dim")
        self.q = matrix("q", heads, d, h, width) if whole else None
        down = ("embed", "latent_channel")
        self.q_down = None if whole else matrix("q_down", down, d, latent)
        self.q_norm = None if whole else init.scale(("latent_channel",), (latent,))
        self.q_up = None if whole else matrix("q_up", up, latent, h, width)
        self.kv_down = matrix("kv_down", down, d, rank + mla.rope_dim)
        self.kv_norm = init.scale(("latent_channel",), (rank,))
        self.k_up = matrix("k_up", up, rank, h, mla.nope_dim)
        self.v_up = matrix("v_up", up, rank, h, values)
        self.o = init.matrix(
            key,
            config,
            "mla.o",
            ("heads", "head_dim", "embed"),
            (h, values, d),
            fan_in=h * values,
            residual=True,
        )
        self.gate = matrix("gate", heads, d, h, values) if config.attention_gate else None
        self.sink = init.bias(("heads",), (h,)) if config.attention_sink else None


class Projected(NamedTuple):
    """q [B, S_context, H, N+P] and gate [B, S_context, H, E] of this device's heads; latent [B,
    S_{context,tensor}, Rk] of its own tokens, normed; key [B, S_context, P], which all heads share.
    The last P channels of q, and key, are turned by their positions.
    """

    q: jax.Array
    latent: jax.Array
    key: jax.Array
    gate: jax.Array | None


def _project(p: Mla, x: jax.Array, layer: Layer, inputs: LayerInputs) -> Projected:
    """x[B, S_{context,tensor}, D] -> the same tokens' queries and latents."""
    config, layout = inputs.config, inputs.layout
    mla, down = config.mla, [p.kv_down]
    if p.q_down is not None:
        down.append(p.q_down)
    kv, *rest = linear(x, down, layout, input_name="attention.norm", name="attention.latent")
    latent = rms_norm(kv[..., : mla.kv_rank], p.kv_norm, config.norm_eps)
    key = kv[..., mla.kv_rank :]
    if layout.config.sequence_parallel:
        key = all_gather(key, "tensor", SEQUENCE, layout)

    whole = [weight for weight in (p.q, p.gate) if weight is not None]
    heads = [*linear(x, whole, layout, enter="tensor", name="attention.qkv")] if whole else []
    gate = None if p.gate is None else heads[-1]
    if p.q_norm is not None and p.q_up is not None:
        q = rms_norm(rest[0], p.q_norm, config.norm_eps)
        q = linear(q, p.q_up, layout, enter="tensor", name="attention.qkv")
    else:
        q = heads[0]
    if layer.rope is not None:
        rotation = inputs.rotations[layer.rope, mla.rope_dim]
        key = rotate(key[:, :, None], rotation)[:, :, 0]
        turned = rotate(q[..., mla.nope_dim :], rotation)
        sharper = temperature(layer.rope.scaling) ** 2  # a part of `rotation`, of both its sides
        q = jnp.concatenate([q[..., : mla.nope_dim] * sharper, turned], axis=-1)
    return Projected(q, latent, key, gate)


def _apply(p: Mla, x: jax.Array, layer: Layer, inputs: LayerInputs) -> tuple[jax.Array, None]:
    layout = inputs.layout
    q, latent, key, gate = _project(p, x, layer, inputs)
    k, v = linear(latent, (p.k_up, p.v_up), layout, enter="tensor", name="attention.qkv")
    shared = jnp.broadcast_to(key[:, :, None], (*k.shape[:3], key.shape[-1]))
    k = jnp.concatenate([k, shared], axis=-1)
    o = attend(q, k, v, None if p.sink is None else p.sink[...], layer, inputs)
    return leave(o, gate, p.o, None, layout), None


def _cache(
    config: ModelConfig, count: int, rows: int, slots: int, layout: Layout, dtype: Any
) -> jax.Array:
    """[n, B, T, Rk+P], the same on all of tensor."""
    mla = config.mla
    assert mla.kv_rank is not None
    return jnp.zeros((count, rows, slots, mla.kv_rank + mla.rope_dim), dtype)


def _extend(
    p: Mla, x: jax.Array, layer: Layer, inputs: LayerInputs, cache: jax.Array, place: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention as of one key head whose values are the latents: q·k = (q·k_up)·latent, and what
    the values add up to is made of what the latents do.
    """
    config, layout, writing = inputs.config, inputs.layout, inputs.writing
    mla = config.mla
    assert writing is not None and mla.kv_rank is not None
    q, latent, key, gate = _project(p, x, layer, inputs)
    entry = jnp.concatenate([latent, key], axis=-1)
    cache = cache.at[place, writing.rows, writing.slots].set(entry, mode="drop")
    k = cache[place][:, None]

    absorbed = by_head(q[..., : mla.nope_dim], p.k_up, layout, of_input=False)
    q = jnp.concatenate([absorbed, q[..., mla.nope_dim :]], axis=-1)
    q = q * (q.shape[-1] / (mla.nope_dim + mla.rope_dim)) ** 0.5  # the kernel divides by its width
    sink, mask = None if p.sink is None else p.sink[...], mask_of(layer, config)
    values = k[..., : mla.kv_rank]
    o = attend_to(q.astype(x.dtype), k, values, writing.tokens, writing.cached, mask, sink)
    return leave(by_head(o, p.v_up, layout, of_input=True), gate, p.o, None, layout), cache


def _flops(config: ModelConfig, layer: Layer, tokens: int) -> float:
    mla, d, h = config.mla, config.d_model, config.heads
    assert mla.kv_rank is not None
    width, values = mla.nope_dim + mla.rope_dim, mla.value_dim
    weights = d * h * width if mla.q_rank is None else mla.q_rank * (d + h * width)
    weights += d * (mla.kv_rank + mla.rope_dim) + mla.kv_rank * h * (mla.nope_dim + values)
    weights += h * values * d * (1 + config.attention_gate)
    return 2 * weights * tokens + 2 * h * (width + values) * visible_pairs(tokens, None)


def _sent(config: ModelConfig, layer: Layer, runs: LayerRuns, layout: Layout) -> Iterator[Traffic]:
    """Latents enter the heads, and what has no latent as the residual stream; the shared key is
    gathered over tensor, and its gradient reduce-scattered.
    """
    mla = config.mla
    assert mla.kv_rank is not None
    entering = [mla.kv_rank, config.d_model if mla.q_rank is None else mla.q_rank]
    if config.attention_gate and mla.q_rank is not None:
        entering.append(config.d_model)
    for width in entering:
        yield from entrance_sent(width, runs, layout)
    yield from exit_sent(config.d_model, runs, layout, again=exit_again(config, runs))
    if layout.config.sequence_parallel:
        n = runs.tokens(layout) * mla.rope_dim * runs.itemsize
        yield ring("shared key", ALL_GATHER, ["tensor"], n * (runs.passes + runs.again), layout)
        yield ring("shared key", REDUCE_SCATTER, ["tensor"], n * runs.passes, layout)
    widths = mla.nope_dim + mla.rope_dim, mla.value_dim
    yield from context.sent(config.heads, config.heads, *widths, runs, layout)


MLA = Kind(
    scope="attention",
    params=Mla,
    apply=_apply,
    flops=_flops,
    sent=_sent,
    rotary_width=lambda config: config.mla.rope_dim,
    cache=_cache,
    extend=_extend,
)
