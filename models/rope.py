"""Rotary position embedding (arXiv 2104.09864): channel i of a head's first half and of its second
half form a pair, turned by position · theta^(-2i/head_dim).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rotations(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, each [B, S, 1, head_dim/2] in f32, for positions [B, S]. The same for every
    layer.
    """
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions[:, :, None, None].astype(jnp.float32) * frequency.reshape(1, 1, 1, -1)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn x [B, S, H, head_dim] by its positions; the result has x's dtype."""
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)
