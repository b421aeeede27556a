"""f16 and bf16 beside f32, the loss scale, and the skip of what is not finite, on meshes."""

import functools
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.models.position import position_number
from meshwright.sharding.layout import map_params
from meshwright.trainer.config.load import override
from meshwright.trainer.inspect.verify import synthetic_batch
from meshwright.trainer.optim.precision import first_scale
from meshwright.trainer.state import abstract_state, lay_out, named_leaves, state_shardings
from meshwright.trainer.step import make_train_step, shard_loss_and_grads
from runs import (
    SMALL,
    collectives,
    first_devices,
    gradients,
    make_config,
    place,
    random_params,
)

MESHES = ("mesh.data=8", "mesh.fsdp=8", "mesh.data=2 mesh.tensor=4")


def first(config):
    """A state that has lived: of `random_params`, with other moments than zeros."""
    layout = lay_out(config, first_devices(config))
    abstract = abstract_state(config)
    state = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.01, leaf.dtype), abstract)
    scale = jax.device_get(first_scale(config.precision))
    state = replace(state, params=random_params(config), loss_scale=scale)
    return jax.device_put(state, state_shardings(abstract, layout))


def step_of(config):
    return make_train_step(config, lay_out(config, first_devices(config)))


def batches(config, count):
    return [synthetic_batch(override(config, f"run.seed={seed}")) for seed in range(count)]


def bits(state):
    return {name: np.asarray(leaf).tobytes() for name, leaf in named_leaves(state).items()}


def attempt(step, state, batch, config):
    layout = lay_out(config, first_devices(config))
    state, metrics = step(state, place(batch, config, layout))
    metrics = jax.device_get(metrics)
    metrics["position"] = position_number(metrics["position"])
    return state, jax.device_get(state), metrics


@pytest.mark.parametrize(
    "mesh",
    [
        *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in MESHES),
        "mesh.fsdp=2 mesh.expert=4 model.moe.experts=4 model.moe.bias_update_rate=0.01",
    ],
)
def test_a_nan_on_one_shard_skips_the_attempt_on_all(mesh):
    """Case C10."""
    config = make_config(*SMALL, *mesh.split(), "optimizer.ema=0.9")
    one, two, poisoned, four = batches(config, 4)
    weights = np.array(poisoned.weights)
    weights[0, 5, 3] = np.nan  # one token of one row
    poisoned = replace(poisoned, weights=weights)

    step, state = step_of(config), first(config)
    for batch in (one, two):
        state, before, metrics = attempt(step, state, batch, config)
    assert (metrics["step"], metrics["skipped"]) == (2, 0)

    state, after, metrics = attempt(step, state, poisoned, config)
    assert np.isnan(metrics["loss"]) and np.isnan(metrics["grad_norm"])
    assert (metrics["step"], metrics["skipped"], metrics["position"]) == (2, 1, 3 * 16)
    changed = {name for name, value in bits(after).items() if value != bits(before)[name]}
    assert changed == {"skipped", "position"}
    for leaf in jax.tree.leaves(state):  # every device's copy, not the first's alone
        whole = np.asarray(leaf)
        for shard in leaf.addressable_shards:
            assert np.array_equal(np.asarray(shard.data), whole[shard.index])

    state, after, metrics = attempt(step, state, four, config)
    assert (metrics["step"], metrics["skipped"], metrics["position"]) == (3, 1, 4 * 16)

    state = first(config)  # the same run without the poisoned batch
    for batch in (one, two, four):
        state, straight, _ = attempt(step, state, batch, config)
    differing = {name for name, value in bits(after).items() if value != bits(straight)[name]}
    assert differing == {"skipped", "position"}


@functools.cache
def scaled_attempts(mesh):
    """Scales, counts and losses of seven attempts from a scale that one row's weight overflows."""
    config = make_config(
        *(*SMALL, *mesh.split(), "train.microbatches=2", "optimizer.name=sgd"),
        *(
            "precision.compute=f16",
            "precision.loss_scale=megatron",
            "precision.first_scale=2097152",
        ),
    )
    step, state = step_of(config), first(config)
    heavy = synthetic_batch(config)
    weights = np.array(heavy.weights)
    weights[0, :8] = 1e-3  # all that counts lies on one row of the second half
    weights[0, 9:] = 1e-3
    heavy, trace = replace(heavy, weights=weights), []
    for _ in range(7):
        state, _, metrics = attempt(step, state, heavy, config)
        trace.append({name: float(value) for name, value in metrics.items()})
    return trace


@pytest.mark.parametrize(
    "mesh", [*(pytest.param(mesh, marks=pytest.mark.slow) for mesh in MESHES[:2]), MESHES[2]]
)
def test_an_overflow_on_one_shard_is_an_overflow_on_all(mesh):
    trace, expected = scaled_attempts(mesh), scaled_attempts("mesh.data=1")
    for name in ("loss_scale", "skipped", "step", "position"):
        assert [line[name] for line in trace] == [line[name] for line in expected]
    scales = [line["loss_scale"] for line in expected]
    assert scales[:4] == [2.0**21, 2.0**21, 2.0**20, 2.0**19]  # hysteresis 2
    assert 2 <= expected[-1]["skipped"] < 7
    assert expected[-1]["step"] == 7 - expected[-1]["skipped"]
    assert trace[-1]["loss"] == pytest.approx(expected[-1]["loss"], rel=2e-3)


def test_a_power_of_two_scales_the_loss_and_nothing_else():
    """In f32 nothing is rounded: a derivative that the scale missed would show."""
    config = make_config(
        *(*SMALL, "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "train.microbatches=2"),
        *("train.z_loss=1e-2", "train.label_smoothing=0.1", "model.bias=all"),
    )
    layout = lay_out(config, first_devices(config))
    shardings = state_shardings(abstract_state(config), layout).params
    params = jax.device_put(random_params(config), shardings)
    run = jax.jit(shard_loss_and_grads(config, layout, params))
    batch = place(synthetic_batch(config), config, layout)
    plain = run(params, batch, 0, jnp.float32(1))
    for scale in (2.0**-10, 2.0**20):
        scaled = run(params, batch, 0, jnp.float32(scale))
        chex.assert_trees_all_equal(scaled, plain)


ALL_EXPERTS = ("model.moe.experts=4", "model.moe.experts_per_token=4")
"""All of them, since rounding would choose others."""

HALVES = {"bf16": 2**-8, "f16": 2**-11}
IN_HALVES = [
    ("mesh.data=1", ()),
    ("mesh.data=2 mesh.fsdp=2 mesh.tensor=2", ()),
    ("mesh.fsdp=2 mesh.expert=2 mesh.tensor=2", ALL_EXPERTS),
    ("mesh.pipe=2 mesh.tensor=2 layout.schedule=zb_h1 train.microbatches=2", ()),
]


@pytest.mark.parametrize(
    ("compute", "mesh", "model"),
    [
        ("f16", *IN_HALVES[0]),
        ("bf16", *IN_HALVES[1]),
        ("f16", *IN_HALVES[3]),
        *(
            pytest.param(compute, *IN_HALVES[case], marks=pytest.mark.slow)
            for compute, case in (("bf16", 0), ("f16", 1), ("bf16", 2), ("f16", 2), ("bf16", 3))
        ),
    ],
)
def test_gradients_in_half_the_bits_are_those_of_f32_up_to_rounding(compute, mesh, model):
    rounding = HALVES[compute]
    metrics, grads = gradients(*SMALL, *model, *mesh.split(), f"precision.compute={compute}")
    expected, expected_grads = gradients(*SMALL, *model)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=rounding)
    for name, leaf in expected_grads.items():
        error = np.abs(grads[name] - leaf).max() / np.abs(leaf).max()
        assert 0 < error < 32 * rounding, name  # some thirty roundings lie between


@pytest.mark.parametrize(
    "zero", [0, *(pytest.param(zero, marks=pytest.mark.slow) for zero in (1, 2)), 3]
)
def test_gradients_travel_in_bf16_where_that_is_asked_for(zero):
    """Case C12."""
    overrides = (*SMALL, "mesh.data=2", "mesh.fsdp=4", f"layout.zero={zero}")
    config = make_config(*overrides, "precision.reduce=bf16", "model.bias=all")
    layout = lay_out(config, first_devices(config))
    params = abstract_state(config).params
    batch = place(synthetic_batch(config), config, layout)
    lowered = jax.jit(shard_loss_and_grads(config, layout, params)).lower(params, batch)
    reduced = [
        dtype
        for name, dtype in collectives(lowered.as_text())
        if name in ("all_reduce", "reduce_scatter")
    ]
    sums = 2  # the number of targets; the logged loss
    assert reduced.count("f32") == sums
    assert reduced.count("bf16") >= len(jax.tree.leaves(params))

    metrics, grads = gradients(*overrides, "precision.reduce=bf16", "model.bias=all")
    expected, exact = gradients(*overrides, "model.bias=all")
    assert metrics == expected
    for name, leaf in exact.items():
        error = np.abs(grads[name] - leaf).max() / np.abs(leaf).max()
        assert 0 < error < 4 * 2**-8, name


def test_accumulation_is_f32_even_where_gradients_travel_in_bf16():
    """On one device none travels."""
    overrides = (*SMALL, "train.microbatches=8")
    _, grads = gradients(*overrides, "precision.reduce=bf16")
    _, expected = gradients(*overrides)
    for name, leaf in expected.items():
        assert np.array_equal(grads[name], leaf), name


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param("mesh.data=1", marks=pytest.mark.slow),
        "mesh.data=2 mesh.fsdp=2 mesh.tensor=2",
        pytest.param("mesh.pipe=2 mesh.tensor=2 layout.schedule=zb_h1", marks=pytest.mark.slow),
    ],
)
def test_halt_on_nan_marks_the_microbatch_and_the_parameters(mesh):
    overrides = (*SMALL, *mesh.split(), "train.microbatches=2", "train.halt_on_nan=true")
    config = make_config(*overrides)
    layout, params = lay_out(config, first_devices(config)), random_params(config)
    batch = synthetic_batch(config)
    tokens = np.where(batch.tokens == 7, 8, batch.tokens)
    tokens[0, 12, 3] = 7  # in the second half of the rows, hence in the second micro-batch
    batch = place(replace(batch, tokens=tokens), config, layout)
    run = jax.jit(shard_loss_and_grads(config, layout, params))
    shardings = state_shardings(abstract_state(config), layout).params

    def marks(params):
        metrics, _ = run(jax.device_put(params, shardings), batch)
        return np.asarray(metrics["nonfinite"])

    names = list(named_leaves(params))
    assert marks(params).tolist() == [[False] * len(names)] * 2
    embed = params.embed.get_value().copy()
    embed[7, 2] = np.inf
    first, second = marks(replace_embed(params, embed))
    assert not first.any()
    assert dict(zip(names, second, strict=True))["layers.attention.q"]


def replace_embed(params, embed):
    return map_params(lambda param: embed if param is params.embed else param.get_value(), params)
