"""Law 0 for optimizers: the same recorded gradients in two layouts give the same parameters, and
what each optimizer keeps is cut over the mesh like the parameters.

Training in two layouts would not show it: Adam and Lion blow the rounding of gradients up.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshwright.sharding.layout import map_params, specs
from meshwright.trainer.config.load import override
from meshwright.trainer.log.summary import device_bytes
from meshwright.trainer.optim.optimizer import make_optimizer
from meshwright.trainer.optim.update import update_params
from meshwright.trainer.state import (
    State,
    abstract_state,
    eval_params,
    eval_part,
    init_state,
    lay_out,
    named_leaves,
    next_average,
    state_shardings,
    state_specs,
    with_params,
)
from runs import SMALL, first_devices, make_config, random_params, train

OPTIMIZERS = {
    "adamw": (),
    "lion": ("optimizer.b2=0.99",),
    "adafactor": ("optimizer.min_dim_size_to_factor=8",),
    "sgd": ("optimizer.momentum=0.9", "optimizer.nesterov=true"),
    "muon": (),
    "lamb": (),
}
UPDATES, LR = 20, 0.01


def config_of(name: str, *overrides: str):
    return make_config(*SMALL, "model.bias=all", f"optimizer.name={name}", *OPTIMIZERS[name],
                       *overrides)  # fmt: skip


@functools.cache
def recorded_gradients(*model: str):
    """Twenty of random scales from 1e-3 to 10, each with whole rows and whole leaves of zeros."""
    rng, shapes = np.random.default_rng(3), abstract_state(config_of("sgd", *model)).params

    def gradient(param):
        value = rng.normal(size=param.get_value().shape).astype(np.float32)
        value *= 10 ** rng.uniform(-3, 1) * (rng.random() < 0.9)
        if param.role == "embedding":
            value[rng.random(len(value)) < 0.7] = 0
            value[257:] = 0  # padding of the vocabulary
        return np.float32(value)

    return [map_params(gradient, shapes) for _ in range(UPDATES)]


@functools.cache
def state_after_updates(name: str, *overrides: str) -> State:
    """From random_params with the recorded gradients: the optimizer alone, as the step runs it."""
    config = config_of(name, *overrides)
    layout = lay_out(config, first_devices(config))
    optimizer = make_optimizer(config.optimizer, layout)
    shardings = state_shardings(abstract_state(config), layout)
    params = jax.tree.map(jnp.asarray, random_params(config))
    zero = jnp.int32(0)
    average = None if config.optimizer.ema is None else params
    state = State(zero, zero, zero, params, optimizer.init(params), average, {}, None)
    state = jax.device_put(jax.device_get(state), replace(shardings, buffers={}))

    def update(params, opt, average, grads, step):
        params, own, opt = update_params(optimizer, grads, opt, params, LR, layout)
        return params, opt, next_average(average, own, step, config.optimizer)

    cuts = state_specs(abstract_state(config), layout)
    kept = (cuts.params, cuts.opt, cuts.average)
    grads_cut = specs(random_params(config), layout.state_spec)
    mapped = jax.shard_map(
        update, mesh=layout.mesh, in_specs=(*kept, grads_cut, P()), out_specs=kept, check_vma=False
    )
    jitted = jax.jit(mapped, donate_argnums=(0, 1, 2))
    own = state.params, state.opt, state.average
    recorded = recorded_gradients(*(key for key in overrides if key.startswith("model.")))
    for step, grads in enumerate(recorded, 1):
        own = jitted(*own, grads, jnp.int32(step))
    params, opt, average = own
    return replace(state, params=params, opt=opt, average=average)


EIGHT = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "optimizer.ema=0.8")


EXPERTS = ("model.bias=qkv", "model.moe.experts=8", "model.moe.shared_experts=1")
APART = ("mesh.fsdp=2", "mesh.expert=2", "mesh.tensor=2", "optimizer.ema=0.8", *EXPERTS)
OF_MATRICES = ("muon", "adafactor")


@pytest.mark.parametrize(
    ("name", "model", "layout"),
    [
        *((name, (), EIGHT) for name in OPTIMIZERS),
        *((name, EXPERTS, APART) for name in OF_MATRICES),
    ],
)
def test_recorded_gradients_give_the_same_parameters_in_two_layouts(name, model, layout):
    one = state_after_updates(name, "optimizer.ema=0.8", *model)
    eight = state_after_updates(name, *layout)
    assert len(jax.tree.leaves(eight.params)[0].sharding.device_set) == 8
    first = named_leaves(random_params(config_of(name, *model)))
    found = {"params": eight.params, "average": eval_params(eight)}
    for tree, expected in (("params", one.params), ("average", eval_params(one))):
        for path, leaf in jax.device_get(named_leaves(expected)).items():
            scale = np.abs(leaf).max()
            assert np.abs(leaf - first[path]).max() > 1e-3 * scale, path
            other = jax.device_get(named_leaves(found[tree])[path])
            np.testing.assert_allclose(
                other / scale, leaf / scale, rtol=0, atol=1e-6, err_msg=f"{tree} {path}"
            )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_that_pad_the_vocabulary_stay_zero(name):
    state = state_after_updates(name, *EIGHT)
    for table in (state.params.embed, state.params.unembed):
        assert not np.asarray(table.get_value())[257:].any()


@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, EIGHT) for name in OPTIMIZERS), *((name, APART) for name in OF_MATRICES)],
)
def test_the_state_keeps_its_shardings(name, layout):
    config = config_of(name, *layout)
    state = state_after_updates(name, *layout)
    expected = state_shardings(abstract_state(config), lay_out(config))
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


LAYERS, D, HEADS, KV, FF, VOCAB = 2, 16, 16, 8, 24, 384
OTHER_SIDES = [HEADS, KV, KV, HEADS, FF, FF, FF]
"""Of q, k, v, o, gate, up and down; the side that fsdp cuts is D."""
MATRICES, TABLES = LAYERS * D * sum(OTHER_SIDES), 2 * VOCAB * D
VECTORS = 2 * LAYERS * D + D
COUNT = 4

EXPECTED_BYTES = {
    "adamw": lambda n: 8 * ((MATRICES + TABLES) // n + VECTORS) + COUNT,
    "lamb": lambda n: 8 * ((MATRICES + TABLES) // n + VECTORS) + COUNT,
    "lion": lambda n: 4 * ((MATRICES + TABLES) // n + VECTORS) + COUNT,
    "sgd": lambda n: 4 * ((MATRICES + TABLES) // n + VECTORS),
    "muon": lambda n: 4 * MATRICES // n + 8 * (TABLES // n + VECTORS) + COUNT,
    "adafactor": lambda n: (
        4 * (LAYERS * sum(D // n + other for other in OTHER_SIDES) + 2 * (D // n + VOCAB) + VECTORS)
        + COUNT
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bytes_per_device(name):
    """With ZeRO an eighth of all that has the dim D of a matrix, and the whole of the rest."""
    for devices, zero in ((1, 3), (8, 0), (8, 1), (8, 3)):
        config = make_config(
            *(*SMALL, f"optimizer.name={name}", *OPTIMIZERS[name]),
            *(f"mesh.fsdp={devices}", f"layout.zero={zero}"),
        )
        layout, state = lay_out(config, first_devices(config)), abstract_state(config)
        held = device_bytes(state.opt, state_shardings(state, layout).opt)
        assert held == EXPECTED_BYTES[name](devices if zero else 1)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_the_step_compiles_with_its_shardings_pinned(name):
    overrides = ("mesh.fsdp=8", f"optimizer.name={name}", *OPTIMIZERS[name])
    history, state = train(2, *SMALL, *overrides, "optimizer.ema=0.9")
    config = make_config(*SMALL, *overrides, "optimizer.ema=0.9")
    expected = state_shardings(abstract_state(config), lay_out(config))
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        assert np.isfinite(leaf).all()
    assert all(np.isfinite(metrics["loss"]) for metrics in history)
    after = named_leaves(state.params)
    assert all(
        (after[path] != leaf).any() for path, leaf in named_leaves(random_params(config)).items()
    )


@pytest.fixture(scope="module")
def averaging():
    """The average is cut over fsdp where ZeRO 1 does not cut the parameters."""
    config = config_of("sgd", *EIGHT, "layout.zero=1")
    layout = lay_out(config)
    return config, layout, init_state(config, layout)


def test_what_is_evaluated_lies_like_the_parameters(averaging):
    _, _, state = averaging
    average = eval_params(state)
    chex.assert_trees_all_equal(average, state.params)
    for leaf, param in zip(jax.tree.leaves(average), jax.tree.leaves(state.params), strict=True):
        assert leaf.sharding.is_equivalent_to(param.sharding, leaf.ndim)
    assert not all(
        leaf.sharding.is_equivalent_to(param.sharding, leaf.ndim)
        for leaf, param in zip(
            jax.tree.leaves(state.average), jax.tree.leaves(state.params), strict=True
        )
    )


def test_without_an_average_the_parameters_themselves_are_evaluated(averaging):
    config, layout, _ = averaging
    state = init_state(override(config, "optimizer.ema=null"), layout)
    assert eval_params(state) is state.params
    assert eval_part(state) == {"params": state.params, "buffers": {}}
    other = jax.tree.map(jnp.zeros_like, state.params)
    begun = with_params(state, other)
    assert begun.params is other
    assert all(
        getattr(begun, name) is value for name, value in vars(state).items() if name != "params"
    )


def test_other_parameters_begin_their_own_average(averaging):
    _, _, state = averaging
    doubled = jax.tree.map(lambda leaf: 2 * leaf, state.params)
    begun = with_params(state, doubled)
    chex.assert_trees_all_equal(eval_params(begun), doubled)
    for leaf, before in zip(jax.tree.leaves(begun), jax.tree.leaves(state), strict=True):
        assert leaf.sharding.is_equivalent_to(before.sharding, leaf.ndim)
    buffers = [
        {shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards}
        for leaf in jax.tree.leaves((begun.params, begun.average))
    ]
    assert sum(map(len, buffers)) == len(set.union(*buffers))


def test_the_average_is_found_by_its_name_in_a_checkpoint(averaging):
    _, _, state = averaging
    part, whole = named_leaves(eval_part(state)), named_leaves(state)
    assert list(part) == [f"average.{path}" for path in named_leaves(state.params)]
    for path, leaf in part.items():
        assert (leaf.shape, leaf.dtype) == (whole[path].shape, whole[path].dtype)
