"""Optimizers from optax by name, as a chain: the rule, weight decay, the learning rate.

The rate is handed to each update (`lr=`); the chain has no schedule of its own. What differs
between parameters goes by the role they were declared with, never by their number of dims: stacking
layers changes those. All state but counters is `nnx.Param`s with the logical axes of its dims, so
that it is cut over the mesh like the parameters (`state_specs`). Rules that look at more than one
element at once, Muon, Adafactor and LAMB, reduce over the mesh axes that cut a parameter, by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ...sharding.layout import Layout, is_param, map_params, spec_axes
from ...sharding.traffic import ALL_REDUCE, Traffic, ring
from ..config import OptimizerConfig
from .adafactor import adafactor_sent, scale_by_factored_rms
from .matrix_sides import layer_rms, mesh_axes
from .muon import muon, muon_sent


def make_optimizer(
    config: OptimizerConfig, layout: Layout | None = None
) -> optax.GradientTransformationExtraArgs:
    """`update(grads, state, params, lr=rate)`: clipped gradients -> what to add to the parameters.
    With a layout, of the parts that `Layout.state_spec` gives a device, inside a `shard_map`;
    without, of whole arrays, like `init(params)` always.

    adamw: 1711.05101. lion: 2302.06675. adafactor: 1804.04235, without momentum, its step relative
    to the parameter's root mean square. sgd: heavy ball, or Nesterov's. muon: see `muon`. lamb:
    1904.00962, with the ratio of norms where weights are, not for norms and biases. Adafactor and
    LAMB measure each layer by itself.
    """
    links = [_kept_as(_rule(config, layout), config.moments), _decay(config)]
    if config.name == "lamb":
        links.append(_trust_ratio(layout))
    links.append(_rate(config))
    return optax.chain(*links)


def _rule(config: OptimizerConfig, layout: Layout | None) -> optax.GradientTransformation:
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
            factored = scale_by_factored_rms(settings.min_dim_size_to_factor, layout)
            return optax.chain(factored, _relative_step(layout))
        case "sgd":
            return optax.trace(momentum, settings.nesterov) if momentum else optax.identity()
        case "muon":
            return muon(momentum, adam, layout)


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


def _relative_step(layout: Layout | None) -> optax.GradientTransformation:
    """Adafactor's: each layer's update clipped to a root mean square of 1, times the parameter's
    own, at least 1e-3.
    """

    def one(param: nnx.Param, update: jax.Array) -> jax.Array:
        update = update / jnp.maximum(1.0, layer_rms(param, update, layout))
        return update * jnp.maximum(1e-3, layer_rms(param, param.get_value(), layout))

    return optax.stateless(lambda updates, params: map_params(one, params, updates))


def _trust_ratio(layout: Layout | None) -> optax.GradientTransformation:
    """LAMB's: each layer's weights' norm over its update's; 1 where either is 0."""

    def one(param: nnx.Param, update: jax.Array) -> jax.Array:
        if not _has_trust_ratio(param):
            return update
        of_param = layer_rms(param, param.get_value(), layout)
        of_update = layer_rms(param, update, layout)
        either = (of_param == 0.0) | (of_update == 0.0)
        return update * jnp.where(either, 1.0, of_param / jnp.where(either, 1.0, of_update))

    return optax.stateless(lambda updates, params: map_params(one, params, updates))


def _has_trust_ratio(param: nnx.Param) -> bool:
    return param.role in ("embedding", "matrix")


def optimizer_sent(config: OptimizerConfig, param: nnx.Param, layout: Layout) -> Iterator[Traffic]:
    """What the rule sends for one parameter, whole here, in one update."""
    match config.name:
        case "muon":
            yield from muon_sent(param, layout)
        case "adafactor":
            yield from adafactor_sent(param, config.settings.min_dim_size_to_factor, layout)
        case "lamb" if _has_trust_ratio(param):
            dims, value = range(-len(param.axes), 0), param.get_value()
            layers = math.prod(value.shape[: -len(param.axes)])
            stack = layout.state_spec((), value.ndim - len(param.axes))
            sums = 2 * 4 * layers // layout.size(spec_axes(stack))
            yield ring("update rule", ALL_REDUCE, mesh_axes(param, dims, layout), sums, layout)


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
