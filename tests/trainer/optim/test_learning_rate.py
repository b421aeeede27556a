"""The learning rate of update n, and what a resumed run is told of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshwright.trainer.config import Config, OptimizerConfig, TrainConfig
from meshwright.trainer.config.load import override
from meshwright.trainer.optim.learning_rate import learning_rate, rate_change, rate_of_update
from meshwright.trainer.optim.optimizer import make_optimizer
from updates import (
    params_of_every_role,
)

# Schedules


def optax_rate(config: OptimizerConfig, steps: int):
    """n -> rate of update n, put together from optax's own schedules."""
    peak, warmup, last = config.lr, config.warmup, config.lr * config.settings.final_ratio
    rise = optax.linear_schedule(0.0, peak, warmup)
    match config.schedule:
        case "constant":
            return optax.join_schedules([rise, optax.constant_schedule(peak)], [warmup])
        case "cosine":
            return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, last)
        case "linear":
            fall = optax.linear_schedule(peak, last, steps - warmup)
            return optax.join_schedules([rise, fall], [warmup])
        case "wsd":
            cooldown = config.cooldown or max(steps // 5, 1)
            parts = [
                rise,
                optax.constant_schedule(peak),
                optax.linear_schedule(peak, last, cooldown),
            ]
            return optax.join_schedules(parts, [warmup, steps - cooldown])
        case "inverse_sqrt":
            until = max(warmup, 1)
            return lambda n: rise(n) if n < warmup else peak * (until / max(n, until)) ** 0.5


def rates(config: OptimizerConfig, steps: int) -> np.ndarray:
    """[steps] of updates 1 to N, as the step asks for them: by the updates completed before."""
    rate = learning_rate(config, TrainConfig(steps=steps))
    return np.array([float(rate(jnp.int32(done))) for done in range(steps)])


SCHEDULES = ("constant", "cosine", "linear", "wsd", "inverse_sqrt")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ratio", [None, 0.0, 0.1, 1.0])
@pytest.mark.parametrize(
    ("warmup", "steps", "cooldown"),
    [
        (0, 1, 1),
        (0, 2, 1),
        (1, 2, 1),
        (1, 7, 6),
        (0, 7, 7),
        (3, 20, 5),
        (16, 20, None),
        (19, 20, 1),
    ],
)
def test_the_rate_of_update_n_is_optax_s_schedule_at_n(schedule, ratio, warmup, steps, cooldown):
    written = {"final_ratio": ratio} if schedule in ("cosine", "linear", "wsd") else {}
    written |= {"cooldown": cooldown} if schedule == "wsd" else {}
    config = OptimizerConfig(lr=3e-2, schedule=schedule, warmup=warmup, **written)
    expected = optax_rate(config, steps)
    found = rates(config, steps)
    np.testing.assert_allclose(
        found, [float(expected(n)) for n in range(1, steps + 1)], rtol=1e-6, atol=0
    )
    if warmup:
        assert found[0] == pytest.approx(config.lr / warmup, rel=1e-6)
        assert found[warmup - 1] == pytest.approx(config.lr, rel=1e-6)
    last = {"constant": 1.0, "inverse_sqrt": (max(warmup, 1) / steps) ** 0.5}
    last = last.get(schedule, config.settings.final_ratio)
    assert found[-1] == pytest.approx(config.lr * last, rel=3e-7, abs=0)
    if schedule == "wsd":  # update N - c, if there is one, is the last at the peak
        peaks = found[warmup : steps - config.cooldown_updates(steps)]
        np.testing.assert_allclose(peaks, config.lr, rtol=3e-7)
        assert ratio == 1.0 or found[-1] < config.lr


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "wsd"])
@pytest.mark.parametrize(("warmup", "steps"), [(1, 1), (20, 20), (100, 10)])
def test_a_warm_up_as_long_as_the_run_is_all_of_it(schedule, warmup, steps):
    found = rates(OptimizerConfig(lr=1.0, schedule=schedule, warmup=warmup), steps)
    np.testing.assert_allclose(found, np.arange(1, steps + 1) / warmup, rtol=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_rate_stays_at_the_last_one_after_the_end(schedule):
    config = OptimizerConfig(lr=1.0, schedule=schedule, final_ratio=0.25)
    rate = rate_of_update(config, TrainConfig(steps=10))
    assert [float(rate(n)) for n in (10, 11, 1000)] == [0.25] * 3


def test_the_rate_at_the_largest_number_of_updates():
    """N is the largest that State.step counts to."""
    steps = 2**31 - 1
    for schedule in SCHEDULES:
        config = OptimizerConfig(lr=1.0, schedule=schedule, warmup=2**30)
        rate = learning_rate(config, TrainConfig(steps=steps))
        last = {"constant": 1.0, "inverse_sqrt": 0.5**0.5}.get(schedule, 0.1)
        assert float(rate(jnp.int32(steps - 1))) == pytest.approx(last, rel=1e-6)


@pytest.mark.parametrize("tokens", [1, 2048, 3 * 2048 - 1, 3 * 2048])
@pytest.mark.parametrize("schedule", ["cosine", "wsd", "inverse_sqrt"])
def test_warm_up_in_tokens_is_that_in_updates_begun(tokens, schedule):
    train = TrainConfig(steps=20, batch_size=16, seq_len=128)
    in_tokens = OptimizerConfig(schedule=schedule, warmup=f"{tokens}tokens")
    in_updates = OptimizerConfig(schedule=schedule, warmup=-(-tokens // 2048))
    rates = [
        [float(learning_rate(config, train)(done)) for done in range(20)]
        for config in (in_tokens, in_updates)
    ]
    assert rates[0] == rates[1]


# The rate of a run that resumes with another config


RATE_CHANGES = [
    (  # extended after its end
        ("optimizer.lr=6e-3", "optimizer.warmup=20"),
        ("train.steps=800",),
        400,
        "the rate of update 401 is 0.0034, that of update 400 was 0.0006: train.steps=800 "
        "stretches optimizer.schedule=cosine; optimizer.schedule=constant optimizer.lr=0.0006 goes "
        "on at the last rate",
    ),
    (
        (),
        ("train.steps=800", "optimizer.schedule=wsd", "optimizer.cooldown=10"),
        400,
        "the rate of update 401 is 0.001, that of update 400 was 0.0001: train.steps=800 "
        "optimizer.schedule=wsd optimizer.cooldown=10 changes it; optimizer.schedule=constant "
        "optimizer.lr=0.0001 optimizer.cooldown=null goes on at the last rate",
    ),
    (
        ("optimizer.schedule=linear", "optimizer.final_ratio=0.5"),
        ("train.steps=401", "optimizer.warmup=4096000tokens"),
        400,
        "the rate of update 401 is 0.000401, that of update 400 was 0.0005: train.steps=401 "
        "optimizer.warmup=4096000tokens changes it; optimizer.schedule=constant "
        "optimizer.lr=0.0005 optimizer.warmup=0 optimizer.final_ratio=null "
        "goes on at the last rate",
    ),
    (  # a last rate of nothing cannot go on
        ("optimizer.final_ratio=0",),
        ("train.steps=800",),
        400,
        "the rate of update 401 is 0.000498, that of update 400 was 0: train.steps=800 stretches "
        "optimizer.schedule=cosine",
    ),
    (  # in the middle
        (),
        ("train.steps=800",),
        200,
        "the rate of update 201 is 0.000867, and would have been 0.000546: train.steps=800 "
        "stretches optimizer.schedule=cosine; train.steps=400 goes on as before",
    ),
    (
        ("optimizer.schedule=constant",),
        ("train.steps=800", "train.batch_size=64", "optimizer.lr=0.01"),
        200,
        "the rate of update 201 is 0.01, and would have been 0.001: optimizer.lr=0.01 changes it; "
        "optimizer.lr=0.001 goes on as before",
    ),
    (
        ("optimizer.schedule=constant", "optimizer.warmup=4096000tokens"),
        ("train.batch_size=64",),
        200,
        "the rate of update 201 is 0.000402, and would have been 0.000201: train.batch_size=64 "
        "changes it; train.batch_size=32 goes on as before",
    ),
    # as before
    ((), (), 200, None),
    ((), (), 400, None),
    ((), ("optimizer.lr=0.1",), 400, None),  # nothing is left to do
    ((), ("train.steps=800", "optimizer.schedule=constant", "optimizer.lr=0.0001"), 400, None),
    (("optimizer.schedule=constant",), ("train.steps=800",), 400, None),
    (("optimizer.schedule=inverse_sqrt",), ("train.steps=800",), 400, None),
    (("optimizer.warmup=1000",), ("train.steps=800",), 400, None),
    (("optimizer.schedule=wsd",), ("train.steps=800",), 200, None),
    ((), ("train.batch_size=64", "optimizer.clip=2", "mesh.data=8"), 200, None),
]


@pytest.mark.parametrize(("before", "changes", "done", "line"), RATE_CHANGES)
def test_a_resumed_run_is_told_where_its_rate_goes_on_otherwise(before, changes, done, line):
    config = override(Config(), *before)
    assert rate_change(config, override(config, *changes), done) == line


@pytest.mark.parametrize(
    ("before", "changes", "done"),
    [case[:3] for case in RATE_CHANGES if "goes on" in (case[3] or "")],
)
def test_the_keys_that_the_line_names_avoid_it(before, changes, done):
    config = override(Config(), *before)
    changed = override(config, *changes)
    line = rate_change(config, changed, done)
    assert line is not None
    words = [word for word in line.rpartition("; ")[2].split() if "=" in word]
    assert rate_change(config, override(changed, *words), done) is None


def test_the_rate_depends_on_nothing_but_completed_updates():
    """No transformation of the chain counts on its own, so a skipped attempt cannot shift it."""
    config = OptimizerConfig()
    optimizer, params = make_optimizer(config), params_of_every_role()
    grads = jax.tree.map(jnp.ones_like, params)
    first, state = optimizer.update(grads, optimizer.init(params), params, lr=1.0)
    for _ in range(3):
        again, state = optimizer.update(grads, state, params, lr=1.0)
    assert optax.tree.norm(optax.tree.sub(again, first)) < 1e-5
