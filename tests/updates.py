"""Parameters of every role, and some updates of them, for tests of update rules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshwright.trainer.config import OptimizerConfig
from meshwright.trainer.optim.optimizer import make_optimizer

ROLES = ("embedding", "matrix", "norm", "bias")
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
