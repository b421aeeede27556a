"""The learning rate as a function of completed updates, `State.step`, and of nothing else: no
skipped attempt shifts it, and a resumed run continues it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax.numpy as jnp
import optax

from ..config import Config, OptimizerConfig, TrainConfig
from ..config.load import show

RATE_KEYS = (
    *("train.steps", "train.batch_size"),
    *("optimizer.lr", "optimizer.schedule", "optimizer.warmup"),
    *("optimizer.cooldown", "optimizer.final_ratio"),
)
"""Keys that the rate depends on and that may change when a run resumes."""


def learning_rate(config: OptimizerConfig, train: TrainConfig) -> optax.Schedule:
    """Completed updates -> rate of the next one: `rate_of_update` one further."""
    rate = rate_of_update(config, train)
    return lambda done: rate(done + 1)


def rate_of_update(config: OptimizerConfig, train: TrainConfig) -> optax.Schedule:
    """n -> rate of update n of N = train.steps, counted from 1.

    Linear warm-up: update n of the first w has lr·n/w. Then constant; or cosine or linear, from lr
    at update w to lr·final_ratio at update N; or wsd (2404.06395): constant up to update
    N - cooldown, then linear to lr·final_ratio at update N; or inverse_sqrt (1706.03762):
    lr·sqrt(w/n), of no warm-up as of w = 1. After N cosine, linear and wsd stay where they are.
    """
    peak, steps = config.lr, train.steps
    last = peak * config.settings.final_ratio
    warmup = config.warmup_updates(train.tokens_per_update)
    rest = max(steps - warmup, 1)  # a warm-up as long as the run, or longer, leaves no update
    match config.schedule:
        case "constant":
            parts, boundaries = [optax.constant_schedule(peak)], []
        case "cosine":
            ratio = config.settings.final_ratio
            parts, boundaries = [optax.cosine_decay_schedule(peak, rest, ratio)], []
        case "linear":
            parts, boundaries = [optax.linear_schedule(peak, last, rest)], []
        case "wsd":
            cooldown = config.cooldown_updates(steps)
            parts = [optax.constant_schedule(peak), optax.linear_schedule(peak, last, cooldown)]
            boundaries = [steps - cooldown]
        case "inverse_sqrt":
            parts, boundaries = [_inverse_sqrt(peak, max(warmup, 1), warmup)], []
    if warmup:
        parts.insert(0, optax.linear_schedule(0.0, peak, warmup))
        boundaries.insert(0, warmup)
    return optax.join_schedules(parts, boundaries)


def _inverse_sqrt(peak: float, until: int, begin: int) -> optax.Schedule:
    """peak·sqrt(until/n) at update n from `until` on; called with n - `begin`."""
    return lambda count: peak * jnp.sqrt(until / jnp.maximum(count + begin, until))


def rate_change(before: Config, now: Config, done: int) -> str | None:
    """What a run that resumes after `done` updates has to be told of its rate: that the next update
    has another one than the config it was last started with would have given it, or, where that has
    come to its end, than its last; why, and which keys avoid it. None: the rate goes on.
    """
    if done >= now.train.steps:
        return None
    old = rate_of_update(before.optimizer, before.train)
    new = rate_of_update(now.optimizer, now.train)
    last, expected, rate = (
        float(jnp.asarray(rate)) for rate in (old(done), old(done + 1), new(done + 1))
    )
    if abs(rate - expected) <= 1e-5 * max(rate, expected):
        return None
    keys = [key for key in RATE_KEYS if _value(before, key) != _value(now, key)]
    keys = [key for key in keys if _is_read(key, before) or _is_read(key, now)]
    why = f"{_written(now, keys)} changes it"
    if keys == ["train.steps"]:
        why = f"{_written(now, keys)} stretches optimizer.schedule={now.optimizer.schedule}"
    if done < before.train.steps:
        return (
            f"the rate of update {done + 1} is {rate:.3g}, and would have been {expected:.3g}: "
            f"{why}; {_written(before, keys)} goes on as before"
        )
    line = (
        f"the rate of update {done + 1} is {rate:.3g}, that of update {done} was {last:.3g}: {why}"
    )
    return f"{line}; {_constant(now, last, done)} goes on at the last rate" if last else line


def _constant(config: Config, rate: float, done: int) -> str:
    """The overrides with which every update after `done` has that rate."""
    optimizer = config.optimizer
    words = ["optimizer.schedule=constant", f"optimizer.lr={rate:.6g}"]
    if optimizer.warmup_updates(config.train.tokens_per_update) > done:
        words.append("optimizer.warmup=0")
    unread = ["cooldown", "final_ratio"]  # and refused there
    words += [f"optimizer.{key}=null" for key in unread if getattr(optimizer, key) is not None]
    return " ".join(words)


def _is_read(key: str, config: Config) -> bool:
    """Whether the rate depends on one of RATE_KEYS, as other keys of the config are."""
    if key == "train.batch_size":
        return isinstance(config.optimizer.warmup, str)
    return key != "train.steps" or config.optimizer.schedule in ("cosine", "linear", "wsd")


def _written(config: Config, keys: Sequence[str]) -> str:
    return " ".join(f"{key}={show(_value(config, key))}" for key in keys)


def _value(config: Config, key: str) -> Any:
    return reduce(getattr, key.split("."), config)
