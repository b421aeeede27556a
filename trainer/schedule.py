"""The learning rate as a function of completed updates, `State.step`, and of nothing else: no
skipped attempt shifts it, and a resumed run continues it.
"""

from __future__ import annotations

import jax.numpy as jnp
import optax

from .config import OptimizerConfig, TrainConfig


def learning_rate(config: OptimizerConfig, train: TrainConfig) -> optax.Schedule:
    """Completed updates -> rate of the next one.

    Linear warm-up: update i of w (from 1) runs at lr·i/w. Then constant; or cosine or linear to
    lr·final_ratio at train.steps; or wsd (2404.06395): constant, and linear over the last
    `cooldown` updates; or inverse_sqrt (1706.03762): lr·sqrt(w/done) after `done` updates.
    """
    peak, last, steps = config.lr, config.lr * config.final_ratio, train.steps
    warmup = config.warmup_updates(train.tokens_per_update)
    rest = max(steps - warmup, 1)
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
        case "inverse_sqrt":
            parts, boundaries = [_inverse_sqrt(peak, max(warmup, 1), warmup)], []
    if warmup:
        parts.insert(0, optax.linear_schedule(peak / warmup, peak, warmup - 1))
        boundaries.insert(0, warmup)
    return optax.join_schedules(parts, boundaries)


def _inverse_sqrt(peak: float, until: int, begin: int) -> optax.Schedule:
    """peak until `until` updates are done, peak·sqrt(until/done) from then on; counted from
    `begin`.
    """
    return lambda count: peak * jnp.sqrt(until / jnp.maximum(count + begin, until))
