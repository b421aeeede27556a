"""Optimizers from optax by name, as a chain: the rule, weight decay, the learning rate.

The rate is handed to each update (`lr=`); the chain has no schedule of its own. What differs
between parameters goes by the role they were declared with, never by their number of dims: stacking
layers changes those. All state but counters is `nnx.Param`s with the logical axes of its dims, so
that it is cut over the mesh like the parameters (`state_specs`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ...sharding.layout import is_param, map_params
from ..config import OptimizerConfig
from .adafactor import scale_by_factored_rms
from .matrix_sides import by_layer
from .muon import muon

ROLES = ("embedding", "matrix", "norm", "bias")


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """`update(grads, state, params, lr=rate)`: clipped gradients -> what to add to the parameters.

    adamw: 1711.05101. lion: 2302.06675. adafactor: 1804.04235, without momentum, its step relative
    to the parameter's root mean square. sgd: heavy ball, or Nesterov's. muon: see `muon`. lamb:
    1904.00962, with the ratio of norms where weights are, not for norms and biases. Adafactor and
    LAMB measure each layer by itself.
    """
    links = [_kept_as(_rule(config), config.moments), _decay(config)]
    if config.name == "lamb":
        links.append(by_layer(optax.scale_by_trust_ratio(), ("embedding", "matrix")))
    links.append(_rate(config))
    return optax.chain(*links)


def _rule(config: OptimizerConfig) -> optax.GradientTransformation:
    """Gradients -> update per unit of learning rate, before decay and sign."""
    settings = config.settings
    b1, b2, momentum = settings.b1, settings.b2, settings.momentum
    adam = optax.scale_by_adam(b1, b2, settings.eps, nesterov=settings.nesterov)
    match config.name:
        case "adamw" | "lamb":
            return adam
        case "lion":
            return optax.scale_by_lion(b1, b2)
        case "adafactor":
            return optax.chain(
                scale_by_factored_rms(settings.factor_from),
                by_layer(optax.clip_by_block_rms(1.0), ROLES),
                by_layer(optax.scale_by_param_block_rms(), ROLES),
            )
        case "sgd":
            return optax.trace(momentum, settings.nesterov) if momentum else optax.identity()
        case "muon":
            return muon(momentum, adam)


def _kept_as(rule: optax.GradientTransformation, dtype: str) -> optax.GradientTransformation:
    """`rule`, computing in f32, with its moments in `dtype` from one update to the next."""
    if dtype == "f32":
        return rule

    def cast(state: Any, dtype: Any) -> Any:
        def one(node: Any) -> Any:  # a Param is empty where the rule is not the parameter's
            return jax.tree.map(lambda leaf: leaf.astype(dtype), node) if is_param(node) else node

        return jax.tree.map(one, state, is_leaf=is_param)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = rule.update(updates, cast(state, jnp.float32), params)
        return updates, cast(state, jnp.bfloat16)

    return optax.GradientTransformation(
        lambda params: cast(rule.init(params), jnp.bfloat16), update
    )


def _decay(config: OptimizerConfig) -> optax.GradientTransformation:
    """Decoupled weight decay by role."""
    return optax.stateless(
        lambda updates, params: map_params(
            lambda param, update: update + config.decay_of(param.role) * param.get_value(),
            params,
            updates,
        )
    )


def decayed(params: Any, config: OptimizerConfig) -> Any:
    """True for each parameter that decays, in the structure of params."""
    return map_params(lambda param: config.decay_of(param.role) > 0, params)


def rate_factors(params: Any, config: OptimizerConfig) -> Any:
    """Each parameter's factor on the learning rate, in the structure of params."""
    return map_params(lambda param: getattr(config.groups, param.role).lr, params)


def _rate(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """Updates times minus the learning rate of their group."""

    def update(updates: Any, state: Any, params: Any = None, **given: Any):
        factors = rate_factors(updates, config)
        return jax.tree.map(lambda factor, u: -(given["lr"] * factor) * u, factors, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
