"""RMSNorm (arXiv 1910.07467), computed in f32 whatever the activations are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ..sharding.collectives import all_reduce
from ..sharding.layout import Layout
from ..sharding.linear import own_heads


def rms_norm(x: jax.Array, scale: nnx.Param, eps: float) -> jax.Array:
    """x [..., D] over the root of its mean square, times scale [D]; the result has x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale[...].reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def rms_norm_over_heads(x: jax.Array, scale: nnx.Param, eps: float, layout: Layout) -> jax.Array:
    """x [B, S, H_tensor, head_dim] over the root of its mean square over all heads, times scale
    [H_tensor, head_dim]. All-reduces 4·B·S bytes over tensor.

    kv heads that tensor does not divide are repeated equally often, which leaves their mean alone.
    """
    wide = x.astype(jnp.float32)
    squares = jnp.sum(wide * wide, axis=(-2, -1), keepdims=True)
    count = x.shape[-2] * x.shape[-1] * layout.size("tensor")
    mean = all_reduce(squares, "tensor", layout) / count
    own = own_heads(scale[...], scale.axes, layout)
    return (wide * jax.lax.rsqrt(mean + eps) * own[None, None]).astype(x.dtype)
