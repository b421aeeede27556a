"""Initialisation: every parameter is a function of (seed, its name, its layer), drawn at full
logical size inside one jit, so it is the same on every mesh.

Matrices are normal with standard deviation `model.init_std`, by default 1/sqrt(fan in); those that
write to the residual stream (attention output, MLP down) are divided by sqrt(2·layers) more, so
that the stream's variance does not grow with depth (GPT-2). Embedding tables are normal with
1/sqrt(d_model) (or init_std): logits then start at unit scale. Norm scales are one, biases zero,
padding rows of the vocabulary zero.
"""

from __future__ import annotations

import math
import zlib

import jax
import jax.numpy as jnp
from flax import nnx

from .config import ModelConfig


def matrix(
    key: jax.Array,
    config: ModelConfig,
    name: str,
    axes: tuple[str, ...],
    shape: tuple[int, ...],
    fan_in: int,
    residual: bool = False,
) -> nnx.Param:
    std = config.init_std or 1.0 / math.sqrt(fan_in)
    if residual:
        std /= math.sqrt(2 * config.layers)
    return nnx.Param(_normal(key, name, shape) * std, axes=axes, role="matrix")


def embedding(key: jax.Array, config: ModelConfig, name: str) -> nnx.Param:
    """Table [V, D] with the vocabulary padded to config.padded_vocab rows of which the last are
    zero.
    """
    std = config.init_std or 1.0 / math.sqrt(config.d_model)
    table = _normal(key, name, (config.vocab_size, config.d_model)) * std
    padding = config.padded_vocab - config.vocab_size
    return nnx.Param(
        jnp.pad(table, ((0, padding), (0, 0))), axes=("vocab", "embed"), role="embedding"
    )


def scale(axes: tuple[str, ...], shape: tuple[int, ...]) -> nnx.Param:
    return nnx.Param(jnp.ones(shape, jnp.float32), axes=axes, role="norm")


def bias(axes: tuple[str, ...], shape: tuple[int, ...]) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes, role="bias")


def _normal(key: jax.Array, name: str, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.fold_in(key, zlib.crc32(name.encode())), shape, jnp.float32)
