"""Optimizers from optax by name, the learning-rate schedule, and which parameters decay.

The rate is a function of completed updates, `State.step`; optax chains here never hold one of their
own. Decay goes by the role a parameter was declared with, never by its number of dims: stacking
layers changes those.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax

from ..sharding.layout import map_params
from .config import OptimizerConfig


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clipped gradients -> update per unit of learning rate, before the sign: p -= lr·update.
    Moments are f32.

    adamw: decoupled weight decay (arXiv 1711.05101). sgd: heavy-ball momentum.
    """
    if config.name == "adamw":
        rule = optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=jnp.float32)
    else:
        rule = optax.trace(decay=config.momentum) if config.momentum else optax.identity()
    return optax.chain(
        rule, optax.add_decayed_weights(config.weight_decay, mask=lambda p: decayed(p, config))
    )


def decayed(params: Any, config: OptimizerConfig) -> Any:
    """True for each parameter that decays, in the structure of params."""
    return map_params(lambda param: param.role in config.decay, params)


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Completed updates -> rate of the next one.

    Linear warm-up: update i of `warmup` (from 1) runs at lr·i/warmup. Then constant; or cosine or
    linear to lr·final_ratio at `steps`; or wsd (2404.06395): constant, and linear over the last
    `cooldown` updates.
    """
    peak, last = config.lr, config.lr * config.final_ratio
    rest = max(steps - config.warmup, 1)
    match config.schedule:
        case "constant":
            parts, boundaries = [optax.constant_schedule(peak)], []
        case "cosine":
            parts, boundaries = [optax.cosine_decay_schedule(peak, rest, config.final_ratio)], []
        case "linear":
            parts, boundaries = [optax.linear_schedule(peak, last, rest)], []
        case "wsd":
            cooldown = config.cooldown_updates(steps)
            parts = [optax.constant_schedule(peak), optax.linear_schedule(peak, last, cooldown)]
            boundaries = [steps - cooldown]
    if config.warmup:
        parts.insert(0, optax.linear_schedule(peak / config.warmup, peak, config.warmup - 1))
        boundaries.insert(0, config.warmup)
    return optax.join_schedules(parts, boundaries)
