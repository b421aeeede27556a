"""The passes of a chunk: together they are one VJP, and what waits between them is no parameter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshwright.sharding.pipeline.passes import trace_forward, trace_passes

D, LAYERS = 4, 4


def chunk():
    rng = np.random.default_rng(0)
    return {
        "w": jnp.asarray(rng.normal(size=(LAYERS, D, D)), jnp.float32),
        "scale": jnp.asarray(rng.normal(size=(D,)), jnp.float32),
    }


def layers(chunk, x, piece, depth):
    """Two layers at a time, multiplied in bf16: slices of a stack, and weights in another dtype."""
    pairs = chunk["w"].reshape(-1, 2, D, D)

    def pair(x, w):
        for layer in range(2):
            product = x.astype(jnp.bfloat16) @ w[layer].astype(jnp.bfloat16)
            x = x + jnp.tanh(product.astype(jnp.float32)) * (1 + chunk["scale"])[None]
        return x, None

    x, _ = lax.scan(pair, x + piece, pairs)
    share = jnp.sum(x**2) * (1 + depth)
    return (x, share), {"share": share}


@pytest.fixture
def given():
    rng = np.random.default_rng(1)
    x, piece, dy = (jnp.asarray(rng.normal(size=(3, D)), jnp.float32) for _ in range(3))
    return chunk(), x, piece, dy


def test_forward_and_backward_are_one_vjp(given):
    params, x, piece, dy = given
    passes = trace_passes(layers, [], params, x, piece)
    y, sums, stash = passes.forward(params, x, piece, jnp.int32(2))
    grads, taps, dx = passes.backward(params, stash, dy, jnp.asarray(True))

    (expected, share), vjp = jax.vjp(lambda params, x: layers(params, x, piece, 2)[0], params, x)
    expected_grads, expected_dx = vjp((dy, jnp.float32(1)))
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(sums["share"], share)
    assert (list(grads.numbers), taps) == ([0, 1], [])
    for found, wanted in zip(
        jax.tree.leaves((grads.tree, dx)), jax.tree.leaves((expected_grads, expected_dx)),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_where_there_is_nothing_gradients_are_zero(given):
    params, x, piece, dy = given
    passes = trace_passes(layers, [], params, x, piece)
    _, _, stash = passes.forward(params, x, piece, jnp.int32(0))
    grads, _, dx = passes.backward(params, stash, dy, jnp.asarray(False))
    assert not any(leaf.any() for leaf in jax.tree.leaves((grads.tree, dx)))


def test_nothing_that_the_parameters_make_waits(given):
    """Neither weights nor their slices, casts or sums."""
    params, x, piece, _ = given
    passes = trace_passes(layers, [], params, x, piece)
    _, _, stash = passes.forward(params, x, piece, jnp.int32(0))
    of_weights = {(LAYERS, D, D), (LAYERS // 2, 2, D, D), (LAYERS // 2, D, D), (D,), (D, D)}
    assert stash and not of_weights & {leaf.shape for leaf in stash}


def test_a_layer_that_calls_back_does_so_once(given):
    params, x, piece, dy = given
    calls = []

    def telling(chunk, x, piece, depth):
        jax.debug.callback(lambda: calls.append(1))
        return layers(chunk, x, piece, depth)

    passes = trace_passes(telling, [], params, x, piece)

    @jax.jit
    def both(params, x):
        _, _, stash = passes.forward(params, x, piece, jnp.int32(0))
        return passes.backward(params, stash, dy, jnp.asarray(True))[2]

    jax.block_until_ready(both(params, x))
    jax.effects_barrier()
    assert len(calls) == 1


def test_without_a_backward_pass_nothing_is_handed_over(given):
    params, x, piece, _ = given
    y, sums, stash = trace_forward(layers, params, x, piece).forward(params, x, piece, jnp.int32(1))
    (expected, _), _ = layers(params, x, piece, 1)
    np.testing.assert_array_equal(y, expected)
    assert set(sums) == {"share"} and stash == []
