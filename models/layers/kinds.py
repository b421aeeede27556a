"""The table of kinds, what `Layer.mixer` and `Layer.ffn` name; and what a model's layers say of
themselves, put together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ...sharding.layout import Layout
from ...sharding.traffic import LayerRuns, Traffic
from .. import pattern
from ..config import ModelConfig
from ..pattern import Layer
from .attention import ATTENTION
from .mla import MLA
from .moe import MOE
from .sublayer import Kind
from .swiglu import SWIGLU

KINDS: dict[str, Kind] = {"attention": ATTENTION, "mla": MLA, "swiglu": SWIGLU, "moe": MOE}


def adds_loss(config: ModelConfig) -> bool:
    """Whether any layer adds to the loss in training."""
    return any(KINDS[kind].adds_loss for kind in pattern.held(config))


def is_random(config: ModelConfig) -> bool:
    """Whether any layer leaves something to chance in training, dropout apart."""
    return any(KINDS[kind].random(config) for kind in pattern.held(config))


def first_buffers(config: ModelConfig) -> dict[str, Any]:
    """By kind [n, ...] of its n layers; kinds without buffers are left out."""
    buffers = {}
    for kind, numbers in pattern.held(config).items():
        one = KINDS[kind].buffers(config)
        if one is not None:
            count = len(numbers)
            buffers[kind] = jax.tree.map(partial(_repeated, count=count), one)
    return buffers


def _repeated(a: jax.Array, count: int) -> jax.Array:
    return jnp.broadcast_to(a, (count, *a.shape))


def next_buffers(
    buffers: Mapping[str, Any], sums: dict[str, jax.Array], config: ModelConfig
) -> dict[str, Any]:
    """After an update, from the sums of its step over the whole mesh."""
    return {kind: KINDS[kind].next_buffers(own, sums, config) for kind, own in buffers.items()}


def layer_metrics(
    sums: dict[str, jax.Array], pieces: int, config: ModelConfig
) -> dict[str, jax.Array]:
    """The sums of a step over the whole mesh, those of layers as figures. pieces: devices times
    micro-batches.
    """
    for kind in pattern.held(config):
        sums = KINDS[kind].metrics(sums, pieces)
    return sums


def layer_flops(config: ModelConfig, layer: Layer, tokens: int) -> float:
    """FLOPs of one layer and a row of `tokens`, forward."""
    return sum(KINDS[kind].flops(config, layer, tokens) for kind in layer.kinds)


def layer_sent(
    config: ModelConfig, layer: Layer, runs: LayerRuns, layout: Layout
) -> Iterator[Traffic]:
    """Bytes that one device sends for one layer in a step."""
    for kind in layer.kinds:
        yield from KINDS[kind].sent(config, layer, runs, layout)


def measured(config: ModelConfig) -> int:
    """Numbers that the layers' sums to log have in training."""
    return sum(
        len(numbers) * KINDS[kind].measured(config)[0] + KINDS[kind].measured(config)[1]
        for kind, numbers in pattern.held(config).items()
    )
