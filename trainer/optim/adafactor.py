"""Adafactor's factored second moment (arXiv 1804.04235). What is kept of a matrix carries the axes
of the dims it still has, so it is cut over the mesh like the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ...sharding.layout import Layout, is_param, spec_axes
from ...sharding.traffic import ALL_REDUCE, Traffic, ring
from .matrix_sides import mean_over, mesh_axes, side_size, sides


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FactoredState:
    """What Adafactor keeps."""

    count: jax.Array
    """updates so far"""
    moments: Any
    """for each parameter its mean squares, (by row, by column) or (by element,)"""


def scale_by_factored_rms(
    min_dim_size: int, layout: Layout | None = None
) -> optax.GradientTransformation:
    """Adafactor's second moment (arXiv 1804.04235): of a matrix whose sides are at least
    `min_dim_size` only row and column means are kept. Its decay at update t is 1 - t^-0.8.

    On an unstacked matrix it is `optax.scale_by_factored_rms`; that one factors the two longest
    dims, layers and heads among them, and does not say which are left.
    """

    def first(param: nnx.Param) -> tuple[nnx.Param, ...]:
        factored = is_factored(param, min_dim_size)
        return _row_and_column_means(param, None) if factored else (param,)

    def init(params: Any) -> Any:
        moments = jax.tree.map(first, params, is_leaf=is_param)
        return FactoredState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, moments))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        count = state.count + 1
        new = count.astype(jnp.float32) ** -0.8

        def next_moments(grad: nnx.Param, old: tuple[nnx.Param, ...]) -> tuple[nnx.Param, ...]:
            square = nnx.Param(grad.get_value() ** 2 + 1e-30, axes=grad.axes, role=grad.role)
            now = (square,) if len(old) == 1 else _row_and_column_means(square, layout)
            return jax.tree.map(lambda old, now: (1 - new) * old + new * now, old, now)

        moments = jax.tree.map(next_moments, updates, state.moments, is_leaf=is_param)
        updates = jax.tree.map(partial(_scale, layout), updates, moments, is_leaf=is_param)
        return updates, FactoredState(count, moments)

    return optax.GradientTransformation(init, update)


def is_factored(param: nnx.Param, min_dim_size: int) -> bool:
    pair = sides(param)
    sizes = [side_size(param.get_value(), side) for side in pair] if pair else [0]
    return min(sizes) >= min_dim_size


def _scale(layout: Layout | None, grad: nnx.Param, moments: tuple[nnx.Param, ...]) -> nnx.Variable:
    """grad / sqrt(second moment), for a factored one rows ⊗ columns / mean(rows)."""
    value, pair = grad.get_value(), sides(grad)
    if len(moments) == 1 or pair is None:
        return grad.replace(value * jax.lax.rsqrt(moments[0].get_value()))
    (ins, outs), (rows, columns) = pair, (moment.get_value() for moment in moments)
    rows, columns = jnp.expand_dims(rows, outs), jnp.expand_dims(columns, ins)
    rows = rows / mean_over(grad, rows, ins, layout)
    return grad.replace(value * jax.lax.rsqrt(rows) * jax.lax.rsqrt(columns))


def _row_and_column_means(param: nnx.Param, layout: Layout | None) -> tuple[nnx.Param, ...]:
    pair = sides(param)
    assert pair is not None
    ins, outs = pair
    return _mean(param, outs, layout), _mean(param, ins, layout)


def _mean(param: nnx.Param, dims: tuple[int, ...], layout: Layout | None) -> nnx.Param:
    """The mean over some dims, with the axes of those that are left."""
    count = len(param.axes)
    axes = tuple(axis for dim, axis in enumerate(param.axes, -count) if dim not in dims)
    mean = jnp.squeeze(mean_over(param, param.get_value(), dims, layout), dims)
    return nnx.Param(mean, axes=axes, role=param.role)


def adafactor_sent(param: nnx.Param, min_dim_size: int, layout: Layout) -> Iterator[Traffic]:
    """All-reduces of a parameter: of a factored one the sums of its rows over the axes that cut
    columns, those of its columns over the axes that cut rows, and the mean of the row means; and
    of any two mean squares of each layer, of its update and of its own.
    """
    value, count = param.get_value(), len(param.axes)
    spec = layout.state_spec(param.axes, value.ndim - count)
    local = value.size // layout.size(spec_axes(spec))

    def over(dims: Sequence[int]) -> tuple[tuple[str, ...], int]:
        """Mesh axes of dims, and the elements of a mean over them."""
        axes = mesh_axes(param, dims, layout)
        return axes, local * layout.size(axes) // side_size(value, dims)

    every = tuple(range(-count, 0))
    sums = [over(every)] * 2
    pair = sides(param)
    if pair and is_factored(param, min_dim_size):
        ins, outs = pair
        sums += [over(outs), over(ins)]
        sums.append((mesh_axes(param, ins, layout), over((*ins, *outs))[1]))
    for axes, elements in sums:
        yield ring("update rule", ALL_REDUCE, axes, 4 * elements, layout)
