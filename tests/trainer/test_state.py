"""Where the state lives under each ZeRO stage, how it starts, and how it advances."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshwright.models.position import position_number
from meshwright.trainer.config import OptimizerConfig
from meshwright.trainer.config.load import override
from meshwright.trainer.state import (
    abstract_state,
    init_params,
    init_state,
    lay_out,
    named_leaves,
    next_average,
    state_shardings,
    state_specs,
)


def cut_axes(spec: P) -> set[str]:
    """Mesh axes that a spec names."""
    entries = [(entry,) if isinstance(entry, str) else entry for entry in spec if entry]
    return {axis for entry in entries for axis in entry}


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_moments_follow_their_parameters(small_config, zero, name):
    config = override(
        small_config,
        *(f"layout.zero={zero}", f"optimizer.name={name}"),
        f"optimizer.momentum={'0.9' if name == 'sgd' else 'null'}",
    )
    layout = lay_out(config)
    specs = state_specs(abstract_state(config), layout)
    params, opt = named_leaves(specs.params), named_leaves(specs.opt)
    moments = {path: spec for path, spec in opt.items() if not path.endswith("count")}
    assert len(moments) == (2 if name == "adamw" else 1) * len(params)
    for path, spec in moments.items():
        _, _, param = path.split(".", 2)  # as in 0.mu.layers.attention.q
        axes, state_axes = cut_axes(params[param]), cut_axes(spec)
        assert axes - {"fsdp"} == state_axes - {"fsdp"}
        matrix = "norm" not in param
        assert ("fsdp" in state_axes) == (zero >= 1 and matrix)
        assert ("fsdp" in axes) == (zero == 3 and matrix)
    counters = [specs.step, specs.position, *(opt[path] for path in opt if path not in moments)]
    assert set(counters) == {P()}


@pytest.mark.parametrize(
    ("zero", "param", "moment"),
    [
        (0, P(None, None, "tensor", None), P(None, None, "tensor", None)),
        (1, P(None, None, "tensor", None), P(None, "fsdp", "tensor", None)),
        (3, P(None, "fsdp", "tensor", None), P(None, "fsdp", "tensor", None)),
    ],
)
def test_the_specs_of_one_matrix(small_config, zero, param, moment):
    """q [layers, embed, heads, head_dim]; specs compare by what they place, not how they spell."""
    config = override(small_config, f"layout.zero={zero}")
    layout = lay_out(config)
    shardings = state_shardings(abstract_state(config), layout)

    def placed(tree) -> jax.sharding.Sharding:
        (leaf,) = [leaf for path, leaf in named_leaves(tree).items() if path.endswith(".q")]
        return leaf

    adam = shardings.opt[0]
    for tree, spec in ((shardings.params, param), (adam.mu, moment), (adam.nu, moment)):
        assert placed(tree).is_equivalent_to(layout.sharding(spec), 4)


@pytest.fixture(scope="module")
def first(small_config):
    config = override(small_config, "layout.zero=1", "run.seed=3")
    layout = lay_out(config)
    return config, layout, init_state(config, layout)


def test_the_first_state(first):
    config, layout, state = first
    assert (state.step.item(), position_number(state.position)) == (0, 0)
    assert (state.step.dtype, state.position.dtype) == (jnp.int32, jnp.uint32)
    for leaf in jax.tree.leaves(state.opt):
        assert not np.asarray(leaf).any()
    expected = state_shardings(abstract_state(config), layout)
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        assert len(leaf.addressable_shards) == layout.mesh.size


def test_init_params_are_those_of_the_first_state(first):
    config, layout, state = first
    params = init_params(config, layout)
    chex.assert_trees_all_equal(params, state.params)
    shardings = [[leaf.sharding for leaf in jax.tree.leaves(p)] for p in (params, state.params)]
    assert shardings[0] == shardings[1]


def test_abstract_state_has_the_shapes_and_dtypes_of_the_real_one(first):
    config, _, state = first
    abstract = abstract_state(config)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    for shape, leaf in zip(jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True):
        assert (shape.shape, shape.dtype) == (leaf.shape, leaf.dtype)


def test_named_leaves_are_in_the_order_of_the_leaves(first):
    _, _, state = first
    names = named_leaves(state)
    leaves = jax.tree.leaves(state)
    assert len(names) == len(leaves)
    assert all(a is b for a, b in zip(names.values(), leaves, strict=True))
    assert {"step", "position", "params.embed", "params.layers.attention.q"} <= set(names)


@pytest.mark.parametrize(
    ("devices", "overrides", "message"),
    [
        (4, (), "mesh.data=2 · mesh.fsdp=2 · mesh.tensor=2 needs 8 devices, but there are 4"),
        (6, ("mesh.data=-1",), "needs a multiple of 4 devices, but there are 6"),
        (
            8,
            ("mesh.data=-1", "mesh.fsdp=1", "mesh.tensor=1", "train.batch_size=12"),
            "train.batch_size / train.microbatches=12 is not a multiple of mesh.data=8",
        ),
    ],
)
def test_what_does_not_fit_the_real_devices(small_config, devices, overrides, message):
    config = override(small_config, "device.cpu_devices=null", *overrides)
    with pytest.raises(ValueError, match=message):
        lay_out(config, jax.devices()[:devices])


@pytest.mark.parametrize("decay", [0.5, 0.75, 0.9])
def test_the_average_is_the_mean_at_first_and_exponential_from_then_on(decay):
    """With 0.75 the fourth update is the last of the plain mean."""
    config, trail = OptimizerConfig(ema=decay), np.random.default_rng(0).normal(size=(6, 3))
    average = np.full(3, 7.0)  # nothing of what it began with is left
    for step, params in enumerate(trail, 1):
        average = next_average(average, params, jnp.int32(step), config)
    first = int(1 / (1 - decay) + 1e-9)
    expected = np.mean(trail[:first], axis=0)
    for params in trail[first:]:
        expected = decay * expected + (1 - decay) * params
    np.testing.assert_allclose(average, expected, rtol=1e-5, atol=1e-6)
