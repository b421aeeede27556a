"""Adafactor's factored second moment (arXiv 1804.04235). What is kept of a matrix carries the axes
of the dims it still has, so it is cut over the mesh like the parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ...sharding.layout import is_param
from .matrix_sides import side_size, sides


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FactoredState:
    """moments: for each parameter its mean squares, (by row, by column) or (by element,)."""

    count: jax.Array
    moments: Any


def scale_by_factored_rms(factor_from: int) -> optax.GradientTransformation:
    """Adafactor's second moment (arXiv 1804.04235): of a matrix whose sides are at least
    `factor_from` only row and column means are kept. Its decay at update t is 1 - t^-0.8.

    On an unstacked matrix it is `optax.scale_by_factored_rms`; that one factors the two longest
    dims, layers and heads among them, and does not say which are left.
    """

    def statistics(param: nnx.Param) -> tuple[nnx.Param, ...]:
        value, pair = param.get_value(), sides(param)
        if pair is None or min(side_size(value, side) for side in pair) < factor_from:
            return (param,)
        rows, columns = pair
        return _mean(param, columns), _mean(param, rows)

    def init(params: Any) -> Any:
        moments = jax.tree.map(statistics, params, is_leaf=is_param)
        return FactoredState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, moments))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        count = state.count + 1
        new = count.astype(jnp.float32) ** -0.8
        squares = jax.tree.map(lambda grad: grad * grad + 1e-30, updates)
        moments = jax.tree.map(
            lambda old, now: (1 - new) * old + new * now,
            state.moments,
            jax.tree.map(statistics, squares, is_leaf=is_param),
        )
        updates = jax.tree.map(_scale, updates, moments, is_leaf=is_param)
        return updates, FactoredState(count, moments)

    return optax.GradientTransformation(init, update)


def _scale(grad: nnx.Param, moments: tuple[nnx.Param, ...]) -> nnx.Variable:
    """grad / sqrt(second moment), for a factored one rows ⊗ columns / mean(rows)."""
    value, pair = grad.get_value(), sides(grad)
    if len(moments) == 1 or pair is None:
        return grad.replace(value * jax.lax.rsqrt(moments[0].get_value()))
    (ins, outs), (rows, columns) = pair, (moment.get_value() for moment in moments)
    rows, columns = jnp.expand_dims(rows, outs), jnp.expand_dims(columns, ins)
    rows = rows / jnp.mean(rows, ins, keepdims=True)
    return grad.replace(value * jax.lax.rsqrt(rows) * jax.lax.rsqrt(columns))


def _mean(param: nnx.Param, dims: tuple[int, ...]) -> nnx.Param:
    """The mean over some dims, with the axes of those that are left."""
    count = len(param.axes)
    axes = tuple(axis for dim, axis in enumerate(param.axes, -count) if dim not in dims)
    return nnx.Param(jnp.mean(param.get_value(), dims), axes=axes, role=param.role)
