"""RMSNorm (arXiv 1910.07467), computed in f32 whatever the activations are."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x [..., D] over the root of its mean square, times scale [D]; the result has x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)
