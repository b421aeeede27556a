"""Adafactor against the formula of its paper, and its factored moments."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from meshwright.trainer.config import OptimizerConfig
from meshwright.trainer.optim.adafactor import FactoredState, scale_by_factored_rms
from updates import (
    STACKED,
    run_updates,
    stacked_params,
    values,
)


def test_adafactor_is_the_formula_of_its_paper():
    lr, decay = 0.1, 0.3
    config = OptimizerConfig(name="adafactor", weight_decay=decay, min_dim_size_to_factor=2)
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
