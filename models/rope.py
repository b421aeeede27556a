"""Rotary position embedding (arXiv 2104.09864): channel i of a head's first half and of its second
half form a pair, turned by position · f_i, f_i = theta^(-2i/head_dim); and what is done to the f_i
for sequences s times longer than those trained on.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from .config import RopeScalingConfig
from .pattern import Rope


def rotations(positions: jax.Array, rope: Rope, width: int) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine times the temperature, each [B, S, 1, width/2] in f32, of [B, S]."""
    frequency = frequencies(width, rope.theta, rope.scaling)
    angle = positions[:, :, None, None].astype(jnp.float32) * frequency.reshape(1, 1, 1, -1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if (sharper := temperature(rope.scaling)) != 1.0:
        cos, sin = cos * sharper, sin * sharper
    return cos, sin


def temperature(scaling: RopeScalingConfig) -> float:
    """Factor on queries and on keys: yarn's scores are sharper by its square (2309.00071)."""
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.kind == "yarn" else 1.0


def frequencies(head_dim: int, theta: float, scaling: RopeScalingConfig) -> jax.Array:
    """f[head_dim/2] in radians a token, s = scaling.factor:

    - linear: f/s (2306.15595)
    - ntk: theta·s^(head_dim/(head_dim-2)) for theta, which leaves f_0 and divides the last by s
      (arXiv 2309.00071, section 3.1)
    - llama3: by turns within the original length, f/s up to `low`, f from `high` on, between them
      linear in the turns (2407.21783, and its authors' code)
    - yarn: the same, but linear in i, between whole channels; and a temperature (2309.00071, and
      its authors' code)
    """
    s, pairs = scaling.factor, jnp.arange(0, head_dim, 2, dtype=jnp.float32)
    if scaling.kind == "ntk":
        theta *= s ** (head_dim / (head_dim - 2))
    frequency = theta ** (-pairs / head_dim)
    if scaling.kind in ("none", "ntk"):
        return frequency
    if scaling.kind == "linear":
        return frequency / s
    low, high = scaling.turns
    original = scaling.original
    assert original is not None
    if scaling.kind == "llama3":
        turns = original * frequency / (2 * math.pi)
        kept = (turns - low) / (high - low)
    else:

        def pair_of(turns: float) -> float:
            """The i, not whole, whose pair makes so many turns."""
            wavelength = original / turns
            return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

        first = max(math.floor(pair_of(high)), 0)
        last = min(math.ceil(pair_of(low)), head_dim - 1)
        kept = 1 - (pairs / 2 - first) / max(last - first, 1e-3)
    kept = jnp.clip(kept, 0.0, 1.0)
    return frequency * (kept + (1 - kept) / s)


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn x [B, S, H, head_dim] by its positions; the result has x's dtype."""
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)
