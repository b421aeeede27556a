"""Dtypes of the step, and the dynamic loss scale of f16 (arXiv 1710.03740) as a pure state machine.

f16 holds nothing below 6e-8, and many derivatives lie there; so the loss is multiplied by a scale
before the backward pass, and the gradients are divided by it after, in f32. Too large a scale
overflows: that attempt is skipped, and the scale halved. After a window of attempts without
overflow it is doubled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..config import PrecisionConfig

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}

FLOOR = 1.0
"""The scale never falls below: what overflows here overflows without any scale."""


@dataclass(frozen=True)
class Preset:
    """How a loss scale moves."""

    init: float
    """the first scale"""
    window: int
    """clean attempts before it doubles"""
    hysteresis: int
    """overflows before it halves"""


PRESETS = {"torch": Preset(2.0**16, 2000, 1), "megatron": Preset(2.0**32, 1000, 2)}


class LossScale(NamedTuple):
    """The loss scale and what decides about the next one."""

    scale: jax.Array
    """f32"""
    clean: jax.Array
    """attempts since the last overflow or change, i32"""
    left: jax.Array
    """overflows until the scale halves, i32"""


def first_scale(config: PrecisionConfig) -> LossScale | None:
    """The state that a run begins with; None where compute is not f16 and nothing is scaled."""
    if config.compute != "f16":
        return None
    preset = _preset(config)
    init = preset.init if config.first_scale is None else config.first_scale
    return LossScale(jnp.float32(init), jnp.int32(0), jnp.int32(preset.hysteresis))


def next_scale(
    state: LossScale | None, finite: jax.Array, config: PrecisionConfig
) -> LossScale | None:
    """The state after an attempt whose loss and gradients were all `finite`, or not."""
    if state is None:
        return None
    preset = _preset(config)
    grown = state.clean + 1 >= preset.window
    after_clean = LossScale(
        jnp.where(grown, state.scale * 2, state.scale),
        jnp.where(grown, 0, state.clean + 1),
        jnp.where(grown, preset.hysteresis, state.left),
    )
    left = state.left - 1
    after_overflow = LossScale(
        jnp.where(left <= 0, jnp.maximum(state.scale / 2, FLOOR), state.scale),
        jnp.zeros_like(state.clean),
        jnp.maximum(left, 0),
    )
    return jax.tree.map(
        lambda clean, overflow: jnp.where(finite, clean, overflow), after_clean, after_overflow
    )


def _preset(config: PrecisionConfig) -> Preset:
    return PRESETS[config.loss_scale or "torch"]
