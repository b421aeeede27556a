"""One layer of experts on one device: what it equals, who is dropped, what padding leaves alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

from meshwright.models.config import ROUTE
from meshwright.models.inputs import LayerInputs
from meshwright.models.kernels.attention import Tokens
from meshwright.models.layers.moe import MOE, Moe
from meshwright.models.layers.swiglu import Mlp, swiglu
from meshwright.models.pattern import Layer
from runs import layout_on, make_config, shard_map

SHAPE = ("model.d_model=8", "model.heads=2", "model.d_ff=12", "model.moe.experts=4")
LAYOUT = layout_on()


def apply(x, segments, *overrides, change=lambda p: p):
    """Output and tally of a layer, as one token of a mean over all."""
    config = make_config(*SHAPE, *overrides).model
    p = change(Moe(config, jax.random.key(0)))

    def layer(x, segments):
        return run(p, x, segments, config)

    return shard_map(layer, LAYOUT, P(), P())(x, segments)


def run(p, x, segments, config):
    inputs = LayerInputs(
        config, LAYOUT, segments, Tokens(segments, segments), {}, token_share=jnp.ones(())
    )
    return MOE.apply(p, x, Layer("attention", "moe"), inputs)


def tokens(rows, length):
    x = np.random.default_rng(0).normal(size=(rows, length, 8))
    return jnp.asarray(x, jnp.float32)


def test_one_expert_is_the_dense_mlp():
    """Output and gradients; its router has nothing to learn."""
    x, segments = tokens(2, 8), jnp.zeros((2, 8), int)
    config = make_config(*SHAPE, "model.moe.experts=1", "model.moe.experts_per_token=1").model
    p = Moe(config, jax.random.key(0))
    dense = Mlp(make_config(*SHAPE).model, jax.random.key(0), 12, "mlp")
    for name in ("gate", "up", "down"):
        getattr(dense, name)[...] = getattr(p, name)[...][0]

    def differentiate(layer, p):
        def with_gradients(p, x):
            y, backward = jax.vjp(layer, p, x)
            return y, *backward(jnp.cos(y))

        return shard_map(with_gradients, LAYOUT, P(), P())(p, x)

    def one_expert(p, x):
        return run(p, x, segments, config)[0]

    y, dp, dx = differentiate(one_expert, p)
    expected, ddense, dx_expected = differentiate(lambda p, x: swiglu(p, x, LAYOUT), dense)
    assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert_allclose(dx, dx_expected, rtol=1e-5, atol=1e-6)
    for name in ("gate", "up", "down"):
        found = getattr(dp, name)[...][0]
        assert_allclose(found, getattr(ddense, name)[...], rtol=1e-5, atol=1e-6)
    assert_allclose(dp.router[...], 0, atol=1e-6)
    _, tally = apply(x, segments, "model.moe.experts=1", "model.moe.experts_per_token=1")
    assert tally.by_layer["expert_load"].tolist() == [16]
    assert_allclose(tally.totals["router_aux_loss"], 0.01 * 16, rtol=1e-6)


@pytest.mark.parametrize(
    "options", [(), ("model.moe.capacity_factor=0.5", "model.moe.routing_group=4")]
)
def test_padding_takes_no_capacity_and_no_statistics(options):
    x, real = tokens(2, 16), jnp.arange(16)[None] < 8
    segments = jnp.broadcast_to(jnp.where(real, 0, -1), (2, 16))
    y, tally = apply(x, segments, *options)
    expected, tally_expected = apply(x[:, :8], segments[:, :8], *options)
    assert_allclose(y[:, :8], expected, rtol=1e-5, atol=1e-6)
    assert not np.any(y[:, 8:])
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-6), tally, tally_expected)
    assert bool(tally.by_layer.get("dropped", 0) > 0) == bool(options)


def test_packed_documents_are_balanced_like_padded_ones():
    """C34: a row of two is two units."""
    x = tokens(1, 16)
    _, packed = apply(x, jnp.arange(16)[None] // 8)
    alone = jnp.concatenate([x[:, :8], x[:, 8:]])
    _, padded = apply(alone, jnp.zeros((2, 8), int))
    _, as_one = apply(x, jnp.zeros((1, 16), int))
    assert_allclose(packed.loss, padded.loss, rtol=1e-6)
    assert abs(float(as_one.loss / packed.loss) - 1) > 1e-3


def test_overflow_goes_by_position_or_by_probability():
    def crowd(p):  # all tokens want expert 2 most, the later the more
        p.router[...] = jnp.zeros((8, 4)).at[0, 2].set(1.0)
        return p

    x = tokens(1, 4).at[0, :, 0].set(jnp.arange(1.0, 5.0))
    small = (
        "model.moe.experts_per_token=1",
        "model.moe.capacity_factor=2.0",
        "model.moe.routing_group=4",
    )
    for overflow, served in (("position", [0, 1]), ("probability", [2, 3])):
        overrides = (*small, f"model.moe.overflow={overflow}")
        y, tally = apply(x, jnp.zeros((1, 4), int), *overrides, change=crowd)
        assert np.flatnonzero(np.abs(y[0]).max(-1)).tolist() == served
        found = tally.by_layer
        assert (found["dropped"], found["expert_load"].tolist()) == (2, [0, 0, 4, 0])


def test_ties_are_broken_alike_in_recomputation():
    """C35: the router's logits are all equal; the first experts are chosen, forward and again."""
    config = make_config(*SHAPE).model
    p = Moe(config, jax.random.key(0))
    p.router[...] = jnp.zeros((8, 4))
    x = tokens(2, 8)

    def loss(p, x):
        y, tally = run(p, x, jnp.zeros((2, 8), int), config)
        return jnp.sum(y**2) + tally.loss, tally.by_layer["expert_load"]

    policy = jax.checkpoint_policies.save_only_these_names(ROUTE)
    again = jax.checkpoint(loss, policy=policy)

    def differentiate(function):
        both = jax.value_and_grad(function, argnums=(0, 1), has_aux=True)
        return shard_map(both, LAYOUT, P(), P())(p, x)

    found, expected = differentiate(again), differentiate(loss)
    jax.tree.map(assert_array_equal, found, expected)
    assert expected[0][1].tolist() == [16, 16, 0, 0]
