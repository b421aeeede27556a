"""Update rules against their formulas, groups by role, the average, dtypes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.trainer.config import Config, OptimizerConfig
from meshwright.trainer.config.load import ConfigError, override
from meshwright.trainer.optim.optimizer import decayed, make_optimizer
from meshwright.trainer.state import abstract_state, named_leaves
from updates import (
    ROLES,
    STACKED,
    layer_of,
    params_of_every_role,
    run_updates,
    stacked_params,
    values,
)

NAMES = ("adamw", "lion", "adafactor", "sgd", "muon", "lamb")


# The rules


def test_adamw_is_the_formula_of_its_paper():
    lr, decay, b1, b2, eps = 0.01, 0.3, 0.8, 0.9, 1e-3
    config = OptimizerConfig(weight_decay=decay, b1=b1, b2=b2, eps=eps)
    start, all_grads, params, _ = run_updates(config, lr, updates=5)
    for role, p in values(start).items():
        m = v = np.zeros_like(p)
        for t, grads in enumerate(map(values, all_grads), start=1):
            m = b1 * m + (1 - b1) * grads[role]
            v = b2 * v + (1 - b2) * grads[role] ** 2
            step = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
            p = p - lr * (step + (decay * p if role in ("embedding", "matrix") else 0.0))
        np.testing.assert_allclose(values(params)[role], p, rtol=2e-6, atol=1e-6)


def momentum_of(name: str) -> float | None:
    """0.9 for the rules that read optimizer.momentum."""
    return 0.9 if name in ("sgd", "muon") else None


@pytest.mark.parametrize(
    ("momentum", "nesterov"), [(None, False), (0.0, False), (0.9, False), (0.9, True)]
)
def test_sgd_is_torch_s_with_decoupled_decay(momentum, nesterov):
    lr, decay, mu = 0.05, 0.3, momentum or 0.0
    config = override(
        Config(),
        *("optimizer.name=sgd", "optimizer.weight_decay=0", f"optimizer.nesterov={nesterov}"),
        f"optimizer.momentum={'null' if momentum is None else momentum}",
        f"optimizer.groups.norm.weight_decay={decay}",
    ).optimizer
    start, all_grads, params, state = run_updates(config, lr, updates=5)
    for role, p in values(start).items():
        velocity = np.zeros_like(p)
        for grads in map(values, all_grads):
            velocity = mu * velocity + grads[role]
            step = grads[role] + mu * velocity if nesterov else velocity
            p = p - lr * (step + (decay * p if role == "norm" else 0.0))
        np.testing.assert_allclose(values(params)[role], p, rtol=2e-6, atol=1e-6)
    assert len(jax.tree.leaves(state)) == (len(ROLES) if momentum else 0)


def test_lion_is_the_formula_of_its_paper():
    lr, decay, b1, b2 = 0.01, 0.3, 0.9, 0.99
    config = OptimizerConfig(name="lion", weight_decay=decay, b1=b1, b2=b2)
    start, all_grads, params, _ = run_updates(config, lr, updates=5)
    for role, p in values(start).items():
        m = np.zeros_like(p)
        for grads in map(values, all_grads):
            step = np.sign(b1 * m + (1 - b1) * grads[role])
            m = b2 * m + (1 - b2) * grads[role]
            p = p - lr * (step + (decay * p if role in ("embedding", "matrix") else 0.0))
        np.testing.assert_allclose(values(params)[role], p, rtol=2e-6, atol=1e-6)


def test_lamb_scales_each_layer_of_a_weight_by_its_ratio_of_norms():
    lr, decay, eps = 0.01, 0.3, 1e-6
    config = OptimizerConfig(name="lamb", weight_decay=decay, b1=0.0, b2=0.0, eps=eps)
    start, (grads,), params, _ = run_updates(config, lr, updates=1, start=stacked_params())
    grads, after = values(grads), values(params)
    for name, p in values(start).items():
        step = grads[name] / (np.abs(grads[name]) + eps)
        if STACKED[name][2] in ("embedding", "matrix"):
            step += decay * p
            dims = tuple(range(-len(STACKED[name][0]), 0))
            step *= np.sqrt((p**2).sum(dims, keepdims=True) / (step**2).sum(dims, keepdims=True))
        np.testing.assert_allclose(after[name], p - lr * step, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_learns_the_same_in_a_stack_and_alone(name):
    """Were a rule to see the stack, the layers' norms, means or singular values would mix."""
    of_rule = {"min_dim_size_to_factor": 2} if name == "adafactor" else {}
    config = OptimizerConfig(name=name, momentum=momentum_of(name), **of_rule)
    _, _, stacked, _ = run_updates(config, 0.01, updates=3, start=stacked_params())
    alone = functools.partial(layer_of, layer=1)
    _, _, params, _ = run_updates(config, 0.01, 3, start=alone(stacked_params()), slicing=alone)
    for key, value in values(alone(stacked)).items():
        np.testing.assert_allclose(values(params)[key], value, rtol=1e-6, atol=1e-6, err_msg=key)


# Groups by role


@pytest.mark.parametrize("role", ROLES)
def test_a_group_s_rate_and_decay_move_it_alone(role):
    config = override(
        Config(),
        *("model.bias=qkv", "optimizer.name=sgd", "optimizer.weight_decay=0.25"),
        *(f"optimizer.groups.{role}.lr=0.5", f"optimizer.groups.{role}.weight_decay=0.75"),
    ).optimizer
    optimizer, params = make_optimizer(config), params_of_every_role()
    grads = jax.tree.map(jnp.ones_like, params)
    update, _ = optimizer.update(grads, optimizer.init(params), params, lr=2.0)
    for other, p in values(params).items():
        decay = 0.25 if other in ("embedding", "matrix") else 0.0
        expected = -1.0 * (1 + 0.75 * p) if other == role else -2.0 * (1 + decay * p)
        np.testing.assert_allclose(values(update)[other], expected, rtol=1e-6)


@pytest.mark.parametrize("roles", [[], *([role] for role in ROLES), list(ROLES)])
def test_decay_moves_the_chosen_roles_alone(roles):
    config = override(
        Config(),
        *("model.bias=qkv", "optimizer.name=sgd", "optimizer.weight_decay=0"),
        *(f"optimizer.groups.{role}.weight_decay=0.5" for role in roles),
    ).optimizer
    optimizer, params = make_optimizer(config), params_of_every_role()
    grads = jax.tree.map(jnp.zeros_like, params)
    update, _ = optimizer.update(grads, optimizer.init(params), params, lr=1.0)
    for role in ROLES:
        expected = -0.5 * values(params)[role] if role in roles else 0.0 * values(params)[role]
        np.testing.assert_array_equal(values(update)[role], expected)
    assert {role for role, flag in decayed(params, config).items() if flag.get_value()} == set(
        roles
    )


@pytest.mark.parametrize("layers", [1, 4])
def test_decay_goes_by_role_not_by_the_number_of_dims(layers):
    """Case C13."""
    config = override(Config(), f"model.layers={layers}", "model.bias=all", "model.qk_norm=head")
    flags = named_leaves(decayed(abstract_state(config).params, config.optimizer))
    attention, mlp = ("q", "k", "v", "o"), ("gate", "up", "down")
    matrices = {f"layers.attention.{name}" for name in attention}
    matrices |= {f"layers.swiglu.{name}" for name in mlp}
    assert {name for name, flag in flags.items() if flag} == matrices | {"embed", "unembed"}
    others = {f"{name}_bias" for name in matrices} | {
        "norm",
        "layers.attention.norm",
        "layers.swiglu.norm",
    }
    others |= {"layers.attention.q_norm", "layers.attention.k_norm"}
    assert {name for name, flag in flags.items() if not flag} == others


# What is kept


@pytest.mark.parametrize("name", NAMES)
def test_masters_moments_and_average_are_f32(name):
    """Case C11."""
    config = override(
        Config(),
        *(f"optimizer.name={name}", "optimizer.ema=0.9"),
        f"optimizer.momentum={momentum_of(name) or 'null'}",
        f"optimizer.min_dim_size_to_factor={8 if name == 'adafactor' else 'null'}",
        "precision.compute=bf16",
    )
    state = abstract_state(config)
    leaves = named_leaves((state.params, state.opt, state.average))
    counters = {path for path, leaf in leaves.items() if leaf.dtype == jnp.int32}
    assert {path.rpartition(".")[2] for path in counters} == ({"count"} if name != "sgd" else set())
    assert {leaf.dtype for path, leaf in leaves.items() if path not in counters} == {
        jnp.dtype("float32")
    }


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "muon", "lamb"])
def test_moments_in_bf16_are_bf16_between_updates_alone(name):
    """One update begins from zeros, which bf16 holds, and so is the one with moments in f32."""
    b2 = None if name == "sgd" else 0.9
    half, full = (
        OptimizerConfig(name=name, momentum=momentum_of(name), b2=b2, moments=moments, ema=0.9)
        for moments in ("bf16", "f32")
    )
    _, _, params, state = run_updates(half, 0.01, updates=1, start=stacked_params())
    _, _, expected, other = run_updates(full, 0.01, updates=1, start=stacked_params())
    for key, value in values(expected).items():
        np.testing.assert_array_equal(values(params)[key], value)
    moments = {
        path: leaf
        for path, leaf in named_leaves(state[0]).items()
        if "ount" not in path and "ns_coeffs" not in path
    }
    assert moments
    assert {leaf.dtype for leaf in moments.values()} == {jnp.dtype("bfloat16")}
    for path, leaf in moments.items():
        kept = named_leaves(other[0])[path].astype(jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(leaf, np.float32), np.asarray(kept, np.float32))


# Configs that cannot be


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["optimizer.warmup=4096steps"],
            "optimizer.warmup=4096steps: should be a number of updates, or of tokens as in "
            "2000000tokens",
        ),
        (
            ["optimizer.momentum=0.9"],
            "optimizer.momentum=0.9 is not read by optimizer.name=adamw, only by sgd, muon; "
            "leave it out",
        ),
        (
            ["optimizer.name=lion", "optimizer.nesterov=true"],
            "optimizer.nesterov=true is not read by optimizer.name=lion, only by sgd, adamw, lamb; "
            "leave it out",
        ),
        (
            ["optimizer.cooldown=3"],
            "optimizer.cooldown=3 is not read by optimizer.schedule=cosine, only by wsd; "
            "leave it out",
        ),
        (
            ["optimizer.name=sgd", "optimizer.nesterov=true"],
            "optimizer.nesterov=true needs momentum, but optimizer.momentum=null; "
            "write optimizer.momentum=0.9",
        ),
        (
            ["optimizer.moments=bf16", "optimizer.b2=0.999"],
            "optimizer.moments=bf16 cannot hold a mean with optimizer.b2=0.999: bf16 rounds "
            "changes below 0.00390625 away; write optimizer.b2=0.99 or optimizer.moments=f32",
        ),
        (
            ["optimizer.moments=bf16", "optimizer.name=adafactor"],
            "optimizer.moments=bf16 cannot hold the second moment of optimizer.name=adafactor, "
            "a mean over more and more updates; write optimizer.moments=f32",
        ),
        (
            [
                *("optimizer.schedule=wsd", "optimizer.cooldown=9", "train.steps=10"),
                *("optimizer.warmup=300tokens", "train.batch_size=1", "train.seq_len=128"),
            ],
            "optimizer.warmup=300tokens, 3 updates, and optimizer.cooldown=9 are together longer "
            "than train.steps=10",
        ),
        (
            ["optimizer.groups.matrices.lr=2"],
            "optimizer.groups.matrices: no such key; did you mean optimizer.groups.matrix?",
        ),
        (
            ["optimizer.groups.norm.decay=2"],
            "optimizer.groups.norm.decay: no such key; known are optimizer.groups.norm.lr, "
            "optimizer.groups.norm.weight_decay",
        ),
        (
            ["optimizer.groups.bias.lr=-1"],
            "optimizer.groups.bias.lr=-1: should be greater than or equal to 0",
        ),
        (["optimizer.name=muno"], "optimizer.name=muno: should be 'adamw', 'lion', "),
    ],
)
def test_what_cannot_be_is_refused_on_one_line(overrides, line):
    with pytest.raises(ConfigError) as caught:
        override(Config(), *overrides)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_a_second_moment_in_bf16_would_stick():
    """Why the config refuses it: at b2=0.999 the gradients could vanish and it would not notice."""
    v = jnp.bfloat16(1.0)
    for _ in range(10):
        v = (0.999 * v.astype(jnp.float32)).astype(jnp.bfloat16)
    assert v == 1.0
    assert (0.99 * v.astype(jnp.float32)).astype(jnp.bfloat16) < 1.0
