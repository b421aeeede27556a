"""Update rules that see a parameter as what the model multiplies by: for each layer one matrix
[in, out], its heads merged. Adafactor's factored moment, Muon, and rules by layer.

Told nothing, they would factor, orthogonalise or take norms over the stack of layers too. What a
rule keeps of a matrix carries the axes of the dims it still has, so it is cut over the mesh like
the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers

from ..sharding.layout import is_param, map_params


def sides(param: nnx.Param) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """A matrix's dims of input and of output, counted from the last; None for a vector.

    head_dim belongs to the heads before it: q [L, D, H, head_dim] is L matrices [D, H·head_dim].
    """
    groups: list[tuple[int, ...]] = []
    for dim, axis in enumerate(param.axes, -len(param.axes)):
        if axis == "head_dim" and groups:
            groups[-1] += (dim,)
        else:
            groups.append((dim,))
    return (groups[-2], groups[-1]) if len(groups) > 1 else None


def by_layer(
    rule: optax.GradientTransformation, roles: Collection[str]
) -> optax.GradientTransformation:
    """A rule without state, applied to each layer's parameter alone; parameters of other roles pass
    unchanged.
    """

    def update_one(update: jax.Array, param: jax.Array) -> Any:
        return rule.update(update, rule.init(param), param)[0]

    def one(param: nnx.Param, update: jax.Array) -> jax.Array:
        if param.role not in roles:
            return update
        value, apply = param.get_value(), update_one
        for _ in range(value.ndim - len(param.axes)):
            apply = jax.vmap(apply)
        return apply(update, value)

    return optax.stateless(lambda updates, params: map_params(one, params, updates))


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
        if pair is None or min(_size(value, side) for side in pair) < factor_from:
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


def _size(value: jax.Array, dims: tuple[int, ...]) -> int:
    return math.prod(value.shape[dim] for dim in dims)


def muon(momentum: float, others: optax.GradientTransformation) -> optax.GradientTransformation:
    """Nesterov momentum, orthogonalised by five Newton-Schulz iterations (Muon), for parameters of
    role matrix; `others` for the rest.

    Updates of matrices are scaled to the root mean square 0.2 that AdamW's typically have
    (2502.16982), so that both share one learning rate and one weight decay.
    """

    def sides_here(param: nnx.Param) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        return sides(param) if param.role == "matrix" else None

    def name(param: nnx.Param) -> str:
        return "muon" if sides_here(param) else "others"

    def dimension_numbers(param: nnx.Param) -> Any:
        pair = sides_here(param)
        return MuonDimensionNumbers(*pair) if pair else optax.MaskedNode()

    def rescale(param: nnx.Param, update: jax.Array) -> jax.Array:
        pair = sides_here(param)
        longer = max(_size(update, side) for side in pair) if pair else None
        return update if longer is None else 0.2 * math.sqrt(longer) * update

    orthogonal = optax.contrib.scale_by_muon(
        beta=momentum,
        weight_dimension_numbers=lambda updates: map_params(dimension_numbers, updates),
    )
    return optax.chain(
        optax.partition(
            {"muon": orthogonal, "others": others}, lambda params: map_params(name, params)
        ),
        optax.stateless(lambda updates, params: map_params(rescale, params, updates)),
    )
