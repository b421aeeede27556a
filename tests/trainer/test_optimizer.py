"""Update rules against their formulas, the schedule at every update, and who decays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshwright.trainer.config import Config, OptimizerConfig
from meshwright.trainer.load import override
from meshwright.trainer.optimizer import decayed, learning_rate, make_optimizer
from meshwright.trainer.state import abstract_state, named_leaves

ROLES = ("embedding", "matrix", "norm", "bias")


def params_of_every_role():
    rng = np.random.default_rng(0)

    def param(role):
        value = jnp.asarray(rng.normal(size=(3, 2)), jnp.float32)
        return nnx.Param(value, axes=("embed", "mlp"), role=role)

    return {role: param(role) for role in ROLES}


def run_updates(config: OptimizerConfig, lr: float, updates: int):
    """Parameters after some updates with random gradients, those gradients, and the start."""
    optimizer = make_optimizer(config)
    params = start = params_of_every_role()
    state = optimizer.init(params)
    rng = np.random.default_rng(1)
    all_grads = []
    for _ in range(updates):
        grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)
        all_grads.append(grads)
        update, state = optimizer.update(grads, state, params)
        params = jax.tree.map(lambda p, u: p - lr * u, params, update)
    return start, all_grads, params, state


def by_role(tree) -> dict[str, np.ndarray]:
    return {role: np.asarray(tree[role].get_value(), np.float64) for role in ROLES}


def test_adamw_is_the_formula_of_its_paper():
    lr, decay, b1, b2, eps = 0.01, 0.3, 0.8, 0.9, 1e-3
    config = OptimizerConfig(weight_decay=decay, b1=b1, b2=b2, eps=eps)
    start, all_grads, params, _ = run_updates(config, lr, updates=5)
    for role, p in by_role(start).items():
        m = v = np.zeros_like(p)
        for t, grads in enumerate(map(by_role, all_grads), start=1):
            m = b1 * m + (1 - b1) * grads[role]
            v = b2 * v + (1 - b2) * grads[role] ** 2
            step = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
            p = p - lr * (step + (decay * p if role in ("embedding", "matrix") else 0.0))
        np.testing.assert_allclose(by_role(params)[role], p, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_heavy_ball_with_decoupled_decay(momentum):
    lr, decay = 0.05, 0.3
    config = OptimizerConfig(name="sgd", momentum=momentum, weight_decay=decay, decay=["norm"])
    start, all_grads, params, state = run_updates(config, lr, updates=5)
    for role, p in by_role(start).items():
        velocity = np.zeros_like(p)
        for grads in map(by_role, all_grads):
            velocity = momentum * velocity + grads[role]
            p = p - lr * (velocity + (decay * p if role == "norm" else 0.0))
        np.testing.assert_allclose(by_role(params)[role], p, rtol=2e-6, atol=1e-6)
    assert len(jax.tree.leaves(state)) == (len(ROLES) if momentum else 0)


@pytest.mark.parametrize("roles", [[], *([role] for role in ROLES), list(ROLES)])
def test_decay_moves_the_chosen_roles_alone(roles):
    config = OptimizerConfig(name="sgd", weight_decay=0.5, decay=roles)
    optimizer, params = make_optimizer(config), params_of_every_role()
    grads = jax.tree.map(jnp.zeros_like, params)
    update, _ = optimizer.update(grads, optimizer.init(params), params)
    for role in ROLES:
        expected = 0.5 * by_role(params)[role] if role in roles else 0.0 * by_role(params)[role]
        np.testing.assert_array_equal(by_role(update)[role], expected)


@pytest.mark.parametrize("layers", [1, 4])
def test_c13_decay_goes_by_role_not_by_the_number_of_dims(layers):
    config = override(Config(), f"model.layers={layers}", "model.bias=all", "model.qk_norm=true")
    flags = named_leaves(decayed(abstract_state(config).params, config.optimizer))
    attention, mlp = ("q", "k", "v", "o"), ("gate", "up", "down")
    matrices = {f"blocks.attention.{name}" for name in attention}
    matrices |= {f"blocks.mlp.{name}" for name in mlp}
    assert {name for name, flag in flags.items() if flag} == matrices | {"embed", "unembed"}
    others = {f"{name}_bias" for name in matrices} | {"norm", "blocks.norm1", "blocks.norm2"}
    others |= {"blocks.attention.q_norm", "blocks.attention.k_norm"}
    assert {name for name, flag in flags.items() if not flag} == others


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_c11_masters_and_moments_are_f32(name):
    config = override(
        Config(), f"optimizer.name={name}", "optimizer.momentum=0.9", "precision.compute=bf16"
    )
    state = abstract_state(config)
    moments = 2 if name == "adamw" else 1
    floats = [leaf for leaf in jax.tree.leaves(state.opt) if leaf.ndim]
    assert len(floats) == moments * len(jax.tree.leaves(state.params))
    assert {leaf.dtype for leaf in floats} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}


def expected_rate(config: OptimizerConfig, steps: int, done: int) -> float:
    """The rate of update number done+1, from the words of `learning_rate`."""
    peak, last = config.lr, config.lr * config.final_ratio
    if done < config.warmup:
        return peak * (done + 1) / config.warmup
    progress = min((done - config.warmup) / max(steps - config.warmup, 1), 1.0)
    match config.schedule:
        case "constant":
            return peak
        case "cosine":
            return last + (peak - last) * (1 + np.cos(np.pi * progress)) / 2
        case "linear":
            return peak + (last - peak) * progress
        case "wsd":
            cooldown = config.cooldown or steps // 5
            progress = np.clip((done - (steps - cooldown)) / cooldown, 0.0, 1.0)
            return peak + (last - peak) * progress


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 4, 16])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
def test_the_rate_of_every_update(schedule, warmup, ratio):
    """16 + a fifth of 20: the cool-down of wsd begins where the longest warm-up ends."""
    steps = 20
    config = OptimizerConfig(lr=3e-2, schedule=schedule, warmup=warmup, final_ratio=ratio)
    schedule = learning_rate(config, steps)
    rates = [float(schedule(done)) for done in range(steps + 3)]
    expected = [expected_rate(config, steps, done) for done in range(steps + 3)]
    np.testing.assert_allclose(rates, expected, rtol=1e-6, atol=1e-9)


def test_warm_up_ends_at_the_peak_and_cool_down_starts_from_it():
    config = OptimizerConfig(lr=1.0, schedule="wsd", warmup=3, cooldown=5, final_ratio=0.5)
    rates = [round(float(learning_rate(config, 12)(done)), 6) for done in range(13)]
    third = round(1 / 3, 6)
    assert rates[:4] == [third, round(2 / 3, 6), 1.0, 1.0]
    assert rates[6:] == [1.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5]


def test_a_warm_up_longer_than_the_run_never_reaches_the_peak():
    rates = learning_rate(OptimizerConfig(lr=1.0, warmup=100), steps=10)
    assert float(rates(9)) == pytest.approx(0.1)


def test_the_rate_depends_on_nothing_but_completed_updates():
    """No transformation of the chain counts on its own, so a skipped attempt cannot shift it."""
    config = OptimizerConfig()
    optimizer, params = make_optimizer(config), params_of_every_role()
    grads = jax.tree.map(jnp.ones_like, params)
    first, state = optimizer.update(grads, optimizer.init(params), params)
    for _ in range(3):
        again, state = optimizer.update(grads, state, params)
    assert optax.tree.norm(optax.tree.sub(again, first)) < 1e-5
