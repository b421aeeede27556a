"""Multiplication by the weights of many experts, each row by one of them: `linear` for experts.

Rows are sorted by expert and each expert's filled up to whole blocks, so that a block meets one
matrix and no array has a dim of tokens and one of experts. On CPU a loop multiplies block by block
and stops behind the last one used; elsewhere `lax.ragged_dot` does. As in `linear`, the residuals
are the rows and the weight SHARD, and gradients of weights are f32.

Shapes: N choices of an expert, E experts of this device, R rows of a block, M rows in all, a
multiple of R; K contracted, F produced. A weight is [E, K, F].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .layout import Layout
from .linear import gather_weight, scatter_gradient

LARGEST_BLOCK = 128
SMALLEST_BLOCK = 8


class Groups(NamedTuple):
    """Where rows stand. experts [M/R]: whose each block is; used: blocks that hold rows, a scalar.
    slots [N]: the row of each choice, M where it has none. choices [M]: the choice in each row, N
    where it has none.
    """

    experts: jax.Array
    used: jax.Array
    slots: jax.Array
    choices: jax.Array


def group_rows(experts: jax.Array, count: int) -> Groups:
    """Place choices of `experts` [N], each below `count` or, for none, equal to it, in blocks."""
    choices = experts.shape[0]
    block = _block_size(choices, count)
    blocks = (choices + count * (block - 1)) // block
    order, start, number = sort_choices(experts, count)
    last = jnp.cumsum(-(-number // block))  # block behind each expert's last
    first = jnp.concatenate([jnp.zeros((1,), last.dtype), last])
    expert = jnp.minimum(jnp.searchsorted(last, jnp.arange(blocks), side="right"), count - 1)

    row = (jnp.arange(blocks) - first[expert])[:, None] * block + jnp.arange(block)[None]
    place = jnp.minimum(start[expert][:, None] + row, choices - 1)
    choice = jnp.where(row < number[expert][:, None], order[place], choices).reshape(-1)
    slots = jnp.full((choices,), blocks * block, jnp.int32)
    slots = slots.at[choice].set(jnp.arange(blocks * block, dtype=jnp.int32), mode="drop")
    return Groups(expert, last[-1], slots, choice)


def sort_choices(experts: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Order [N] of the choices by expert, stable, and where each expert's begin and how many they
    are, [count].
    """
    order = jnp.argsort(experts, stable=True)
    bounds = jnp.searchsorted(experts[order], jnp.arange(count + 1))
    return order, bounds[:-1], jnp.diff(bounds)


def _block_size(choices: int, count: int) -> int:
    """A power of two near half of an expert's even share: larger ones leave more rows empty."""
    share = max(choices // (2 * count), 1)
    return min(max(1 << (share.bit_length() - 1), SMALLEST_BLOCK), LARGEST_BLOCK)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def spread(x: jax.Array, choices: jax.Array, slots: jax.Array, width: int) -> jax.Array:
    """x[T, D] -> rows[M, D], each of the token whose choice it holds; zeros where it has none.

    Tokens make `width` choices each: choices [M] in rows, slots [T·width] of choices.
    """
    del slots
    token = jnp.where(choices < x.shape[0] * width, choices // width, x.shape[0])
    return x.at[token].get(mode="fill", fill_value=0)


def _spread_forward(x, choices, slots, width):
    return spread(x, choices, slots, width), (choices, slots)


def _spread_backward(width, indices, drows):
    choices, slots = indices
    dx: Any = collect(drows, choices, slots, width)
    return dx.astype(drows.dtype), None, None


spread.defvjp(_spread_forward, _spread_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def collect(rows: jax.Array, choices: jax.Array, slots: jax.Array, width: int) -> jax.Array:
    """rows[M, D] -> [T, D] in f32, for each token the sum of its choices' rows: what transposes
    `spread`, by a gather where autodiff would scatter.
    """
    del choices
    found = rows.at[slots].get(mode="fill", fill_value=0).astype(jnp.float32)
    return found.reshape(-1, width, rows.shape[1]).sum(axis=1)


def _collect_forward(rows, choices, slots, width):
    return collect(rows, choices, slots, width), (choices, slots, jnp.zeros((0,), rows.dtype))


def _collect_backward(width, residuals, dx):
    choices, slots, like = residuals
    return spread(dx.astype(like.dtype), choices, slots, width), None, None


collect.defvjp(_collect_forward, _collect_backward)


class Weights(NamedTuple):
    """shards [E, K, F] of several weights with one input, and each one's logical axes; axes of ()
    where they are gathered already.
    """

    shards: tuple[jax.Array, ...]
    axes: tuple[tuple[str, ...], ...]


def grouped_linear(
    x: jax.Array, weights: Weights, groups: Groups, layout: Layout
) -> tuple[jax.Array, ...]:
    """Rows x[M, K] times their experts' matrices of each of `weights` -> [M, F] in x's dtype; rows
    of no choice may hold anything.

    Over fsdp each weight is gathered in x's dtype, forward and backward, and its gradient
    reduce-scattered in `layout.reduce`.
    """
    return _grouped(x, weights.shards, groups, weights.axes, layout)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped(x, shards, groups, axes, layout):
    weights = _gathered(shards, axes, x.dtype, layout)
    return tuple(_products(x, weight, groups).astype(x.dtype) for weight in weights)


def _grouped_forward(x, shards, groups, axes, layout):
    return _grouped(x, shards, groups, axes, layout), (x, shards, groups)


def _grouped_backward(axes, layout, residuals, dys):
    x, shards, groups = residuals
    weights = _gathered(shards, axes, x.dtype, layout)
    products = [
        _products(dy, weight, groups, contracted=2) for dy, weight in zip(dys, weights, strict=True)
    ]
    dx = reduce(jnp.add, products).astype(x.dtype)
    dshards = tuple(
        scatter_gradient(_gradient(x, dy, groups, weight.shape[0]), axes, shard.dtype, layout)
        for dy, weight, shard, axes in zip(dys, weights, shards, axes, strict=True)
    )
    return dx, dshards, None


_grouped.defvjp(_grouped_forward, _grouped_backward)


def _gathered(shards: Any, axes: Any, dtype: Any, layout: Layout) -> list[jax.Array]:
    return [
        gather_weight(shard, names, dtype, layout)
        for shard, names in zip(shards, axes, strict=True)
    ]


def _products(x: jax.Array, weight: jax.Array, groups: Groups, contracted: int = 1) -> jax.Array:
    """x[M, K] ·_K weight[E, K, F] of each row's expert -> [M, F] in f32; contracted=2: dim F."""

    def by_block(x: jax.Array, weight: jax.Array, groups: Groups) -> jax.Array:
        def one(number: jax.Array, y: jax.Array) -> jax.Array:
            product = lax.dot_general(
                _block(x, number, groups),
                weight[groups.experts[number]],
                (((1,), (contracted - 1,)), ((), ())),
                preferred_element_type=jnp.float32,
            )
            return lax.dynamic_update_slice_in_dim(y, product, number * _rows(x, groups), 0)

        produced = weight.shape[3 - contracted]
        return _loop(groups, one, jnp.zeros((x.shape[0], produced), jnp.float32))

    def ragged(x: jax.Array, weight: jax.Array, groups: Groups) -> jax.Array:
        sizes = _sizes(x, groups, weight.shape[0])
        turned = weight if contracted == 1 else jnp.swapaxes(weight, 1, 2)
        return lax.ragged_dot(x, turned, sizes, preferred_element_type=jnp.float32)

    return lax.platform_dependent(x, weight, groups, cpu=by_block, default=ragged)


def _gradient(x: jax.Array, dy: jax.Array, groups: Groups, count: int) -> jax.Array:
    """x[M, K] ·_M dy[M, F] over the rows of each expert -> [E, K, F] in f32."""

    def by_block(x: jax.Array, dy: jax.Array, groups: Groups) -> jax.Array:
        def one(number: jax.Array, dweight: jax.Array) -> jax.Array:
            product = lax.dot_general(
                _block(x, number, groups),
                _block(dy, number, groups),
                (((0,), (0,)), ((), ())),
                preferred_element_type=jnp.float32,
            )
            return dweight.at[groups.experts[number]].add(product)

        return _loop(groups, one, jnp.zeros((count, x.shape[1], dy.shape[1]), jnp.float32))

    def ragged(x: jax.Array, dy: jax.Array, groups: Groups) -> jax.Array:
        dims = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        sizes = _sizes(x, groups, count)
        return lax.ragged_dot_general(x, dy, sizes, dims, preferred_element_type=jnp.float32)

    return lax.platform_dependent(x, dy, groups, cpu=by_block, default=ragged)


def _loop(groups: Groups, body: Callable[[Any, Any], Any], start: jax.Array) -> jax.Array:
    return lax.fori_loop(0, groups.used, body, start)


def _rows(x: jax.Array, groups: Groups) -> int:
    """R."""
    return x.shape[0] // groups.experts.shape[0]


def _block(x: jax.Array, number: jax.Array, groups: Groups) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, number * _rows(x, groups), _rows(x, groups))


def _sizes(x: jax.Array, groups: Groups, count: int) -> jax.Array:
    """Rows [E] of each expert's blocks; those of no choice are zeros."""
    used = jnp.arange(groups.experts.shape[0]) < groups.used
    sizes = jnp.zeros((count,), jnp.int32)
    return sizes.at[groups.experts].add(jnp.where(used, _rows(x, groups), 0))
