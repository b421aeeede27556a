"""Update rules against their formulas, groups by role, the average, dtypes, and the schedules."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshwright.trainer.config import Config, OptimizerConfig, TrainConfig
from meshwright.trainer.config.load import ConfigError, override
from meshwright.trainer.optim.adafactor import FactoredState, scale_by_factored_rms
from meshwright.trainer.optim.learning_rate import learning_rate, rate_change, rate_of_update
from meshwright.trainer.optim.matrix_sides import sides
from meshwright.trainer.optim.optimizer import decayed, make_optimizer
from meshwright.trainer.state import abstract_state, named_leaves

ROLES = ("embedding", "matrix", "norm", "bias")
NAMES = ("adamw", "lion", "adafactor", "sgd", "muon", "lamb")
STACKED = {
    "embed": (("vocab", "embed"), (5, 4), "embedding"),
    "q": (("embed", "heads", "head_dim"), (3, 4, 2, 3), "matrix"),
    "o": (("heads", "head_dim", "embed"), (3, 2, 3, 4), "matrix"),
    "up": (("embed", "mlp"), (3, 4, 7), "matrix"),
    "norm": (("channel",), (3, 4), "norm"),
    "bias": (("heads", "head_dim"), (3, 2, 3), "bias"),
}
"""A model's kinds of parameters; all but the first are stacked three layers high."""


def stacked_params(seed: int = 0):
    rng = np.random.default_rng(seed)
    return {
        name: nnx.Param(jnp.asarray(rng.normal(size=shape), jnp.float32), axes=axes, role=role)
        for name, (axes, shape, role) in STACKED.items()
    }


def layer_of(tree, layer: int):
    """One layer's part of each parameter, as a model of that layer would declare it."""
    return {
        name: param.replace(param.get_value()[layer])
        if param.get_value().ndim > len(param.axes)
        else param
        for name, param in tree.items()
    }


def params_of_every_role():
    rng = np.random.default_rng(0)

    def param(role):
        value = jnp.asarray(rng.normal(size=(3, 2)), jnp.float32)
        return nnx.Param(value, axes=("embed", "mlp"), role=role)

    return {role: param(role) for role in ROLES}


def run_updates(config: OptimizerConfig, lr: float, updates: int, start=None, slicing=None):
    """Parameters after some updates with random gradients, those gradients, and the start."""
    optimizer = make_optimizer(config)
    start = params_of_every_role() if start is None else start
    full = stacked_params() if slicing else start
    rng, all_grads = np.random.default_rng(1), []
    params, state = start, optimizer.init(start)

    @jax.jit
    def update(grads, state, params):
        updates, state = optimizer.update(grads, state, params, lr=lr)
        return jax.tree.map(jnp.add, params, updates), state

    for _ in range(updates):
        grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), full)
        grads = slicing(grads) if slicing else grads
        all_grads.append(grads)
        params, state = update(grads, state, params)
    return start, all_grads, params, state


def values(tree) -> dict[str, np.ndarray]:
    return {name: np.asarray(param.get_value(), np.float64) for name, param in tree.items()}


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


def test_adafactor_is_the_formula_of_its_paper():
    lr, decay = 0.1, 0.3
    config = OptimizerConfig(name="adafactor", weight_decay=decay, factor_from=2)
    start, all_grads, params, _ = run_updates(config, lr, updates=4, start=stacked_params())
    shapes = {"embed": (5, 4), "q": (3, 4, 6), "o": (3, 6, 4), "up": (3, 4, 7)}
    for name, p in values(start).items():
        p, second = p.reshape(shapes.get(name, (p.shape[0], -1))), 0.0
        for t, grads in enumerate(map(values, all_grads), start=1):
            g = grads[name].reshape(p.shape)
            second = (1 - t**-0.8) * second + t**-0.8 * g**2
            v = second
            if name in shapes:
                rows, columns = v.mean(-1, keepdims=True), v.mean(-2, keepdims=True)
                v = rows * columns / rows.mean(-2, keepdims=True)
            dims = (-2, -1) if name in shapes else -1
            step = g / np.sqrt(v)
            step /= np.maximum(1.0, np.sqrt((step**2).mean(dims, keepdims=True)))
            step *= np.maximum(1e-3, np.sqrt((p**2).mean(dims, keepdims=True)))
            p = p - lr * (step + (decay * p if name in shapes else 0.0))
        expected = p.reshape(STACKED[name][1])
        np.testing.assert_allclose(values(params)[name], expected, rtol=5e-6, atol=2e-6)


def test_the_factored_moment_of_a_plain_matrix_is_optax_s():
    param = nnx.Param(jnp.ones((8, 6)), axes=("embed", "mlp"), role="matrix")
    grads = [param.replace(jnp.asarray(g)) for g in np.random.default_rng(0).normal(size=(3, 8, 6))]
    ours, theirs = scale_by_factored_rms(6), optax.scale_by_factored_rms(min_dim_size_to_factor=6)
    states = ours.init(param), theirs.init(param)
    for grad in grads:
        update, state = ours.update(grad, states[0], param)
        expected, other = theirs.update(grad, states[1], param)
        states = state, other
        np.testing.assert_allclose(update.get_value(), expected.get_value(), rtol=1e-5)


def test_muon_is_newton_schulz_on_each_layer_s_matrix_and_adamw_elsewhere():
    lr, decay, mu = 0.05, 0.3, 0.9
    config = OptimizerConfig(name="muon", weight_decay=decay, momentum=mu)
    start, all_grads, params, _ = run_updates(config, lr, updates=3, start=stacked_params())
    shapes = {"q": (3, 4, 6), "o": (3, 6, 4), "up": (3, 4, 7)}
    for name, shape in shapes.items():
        p = values(start)[name].reshape(shape)
        m = np.zeros_like(p)
        for t, grads in enumerate(map(values, all_grads), start=1):
            g = grads[name].reshape(shape)
            m = mu * m + (1 - mu) * g
            ahead = mu * m / (1 - mu ** (t + 1)) + (1 - mu) * g / (1 - mu**t)
            step = 0.2 * np.sqrt(max(shape[1:])) * np.stack([newton_schulz(x) for x in ahead])
            p = p - lr * (step + decay * p)
        expected = p.reshape(STACKED[name][1])
        np.testing.assert_allclose(values(params)[name], expected, rtol=5e-6, atol=2e-6)

    rest = {name for name in STACKED if name not in shapes}
    _, _, adamw, _ = run_updates(
        OptimizerConfig(weight_decay=decay), lr, updates=3, start=stacked_params()
    )
    for name in rest:
        np.testing.assert_array_equal(values(params)[name], values(adamw)[name])


def newton_schulz(x: np.ndarray) -> np.ndarray:
    """Five iterations of the quintic from x of unit norm."""
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def test_sides_of_a_matrix_merge_heads_and_leave_stacks_and_experts_out():
    def of(*axes):
        return sides(nnx.Param(jnp.zeros(()), axes=axes, role="matrix"))

    assert of("embed", "mlp") == ((-2,), (-1,))
    assert of("embed", "kv_heads", "head_dim") == ((-3,), (-2, -1))
    assert of("heads", "head_dim", "embed") == ((-3, -2), (-1,))
    assert of("expert", "embed", "mlp") == ((-2,), (-1,))
    assert of("channel") is of("head_dim") is of("heads", "head_dim") is None


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_learns_the_same_in_a_stack_and_alone(name):
    """Were a rule to see the stack, the layers' norms, means or singular values would mix."""
    factor_from = 2 if name == "adafactor" else None
    config = OptimizerConfig(name=name, momentum=momentum_of(name), factor_from=factor_from)
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
def test_c13_decay_goes_by_role_not_by_the_number_of_dims(layers):
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
def test_c11_masters_moments_and_average_are_f32(name):
    config = override(
        Config(),
        *(f"optimizer.name={name}", "optimizer.ema=0.9"),
        f"optimizer.momentum={momentum_of(name) or 'null'}",
        f"optimizer.factor_from={8 if name == 'adafactor' else 'null'}",
        "precision.compute=bf16",
    )
    state = abstract_state(config)
    leaves = named_leaves((state.params, state.opt))
    counters = {path for path, leaf in leaves.items() if leaf.dtype == jnp.int32}
    assert {path.rpartition(".")[2] for path in counters} <= {"count"}
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


def test_factored_moments_have_the_axes_of_their_dims():
    state = scale_by_factored_rms(4).init(stacked_params())
    assert isinstance(state, FactoredState)
    found = {
        name: [(moment.axes, moment.get_value().shape) for moment in moments]
        for name, moments in state.moments.items()
    }
    assert found == {
        "embed": [(("vocab",), (5,)), (("embed",), (4,))],
        "q": [(("embed",), (3, 4)), (("heads", "head_dim"), (3, 2, 3))],
        "o": [(("heads", "head_dim"), (3, 2, 3)), (("embed",), (3, 4))],
        "up": [(("embed",), (3, 4)), (("mlp",), (3, 7))],
        "norm": [(("channel",), (3, 4))],
        "bias": [(("heads", "head_dim"), (3, 2, 3))],
    }
    whole = scale_by_factored_rms(5).init(stacked_params()).moments
    assert {name for name, moments in whole.items() if len(moments) == 2} == set()


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
    in_tokens = OptimizerConfig(schedule=schedule, warmup_tokens=tokens)
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
        ("train.steps=401", "optimizer.warmup_tokens=4096000"),
        400,
        "the rate of update 401 is 0.000401, that of update 400 was 0.0005: train.steps=401 "
        "optimizer.warmup_tokens=4096000 changes it; optimizer.schedule=constant "
        "optimizer.lr=0.0005 optimizer.final_ratio=null "
        "optimizer.warmup_tokens=null goes on at the last rate",
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
        ("optimizer.schedule=constant", "optimizer.warmup_tokens=4096000"),
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


# Configs that cannot be


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["optimizer.warmup=3", "optimizer.warmup_tokens=4096"],
            "optimizer.warmup=3 and optimizer.warmup_tokens=4096 say the same thing; "
            "write one of them",
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
                *("optimizer.warmup_tokens=300", "train.batch_size=1", "train.seq_len=128"),
            ],
            "optimizer.warmup_tokens=300, 3 updates, and optimizer.cooldown=9 are together longer "
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
