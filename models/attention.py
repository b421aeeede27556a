"""The attention sublayer: projections by heads, RoPE, the kernel, the output projection. Training
and decoding differ in the kernel alone, so it is an argument.

Heads are cut over `tensor` (Megatron, arXiv 1909.08053); grouped queries (2305.13245) share kv
heads. Where kv heads are fewer than tensor shards, `linear` hands each shard the ones its queries
need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from ..sharding.layout import Layout
from ..sharding.linear import linear
from . import init
from .attention_kernel import Mask
from .config import ModelConfig
from .norms import rms_norm
from .rope import rotate

Kernel = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], tuple[jax.Array, Any]]
"""Local q [B, S, H, head_dim] and k, v [B, S, K, head_dim], turned by their positions, and sink
[H] -> o like q, and what it keeps: training nothing, decoding its cache.
"""


class Attention(nnx.Module):
    """q [D, H, head_dim], k, v [D, K, head_dim], o [H, head_dim, D], their biases, the norms of
    queries and keys, and sink [H].
    """

    def __init__(self, config: ModelConfig, key: jax.Array):
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
        self.q_norm = init.scale(size, "head_dim") if config.qk_norm else None
        self.k_norm = init.scale(size, "head_dim") if config.qk_norm else None
        self.sink = init.bias(("heads",), (h,)) if config.attention_sink else None


def attend(
    p: Attention,
    x: jax.Array,
    kernel: Kernel,
    rotation: tuple[jax.Array, jax.Array],
    layout: Layout,
    config: ModelConfig,
) -> tuple[jax.Array, Any]:
    """x[B, S_{context,tensor}, D] -> the same, and what the kernel keeps."""
    biases = (p.q_bias, p.k_bias, p.v_bias)
    q, k, v = linear(
        x,
        (p.q, p.k, p.v),
        layout,
        biases=biases,
        enter="tensor",
        input_name="attention.norm",
        name="attention.qkv",
    )
    if p.q_norm is not None and p.k_norm is not None:
        q = rms_norm(q, p.q_norm[...], config.norm_eps)
        k = rms_norm(k, p.k_norm[...], config.norm_eps)
    sink = None if p.sink is None else p.sink[...]
    o, kept = kernel(rotate(q, rotation), rotate(k, rotation), v, sink)
    out = linear(o, p.o, layout, biases=(p.o_bias,), leave="tensor", name="attention.out")
    return out, kept


def causal_mask(config: ModelConfig) -> Mask:
    return Mask(causal=True, window=config.window, softcap=config.attention_softcap)
