"""Multiplication by the weights of many experts, each row by one of them: `linear` for experts.

Rows are sorted by expert, so that each expert meets rows that follow one another, and no array has
a dim of tokens and one of experts. On CPU a loop over experts takes each one's matrices and
multiplies its rows by them in few, large blocks; elsewhere `lax.ragged_dot` does. As in `linear`,
the residuals are x as it came and the weight SHARD, and gradients of weights are f32.

Shapes: N choices of an expert, E experts of this device, M rows, N and room for the last block; K
contracted, F produced. A weight is [E, K, F].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .layout import Layout
from .linear import gather_weight, scatter_gradient

SMALLEST_STEP, LARGEST_STEP = 8, 64


class Groups(NamedTuple):
    """Where rows stand. sizes [E]: rows of each expert, one expert's behind the other's; those
    behind them all are of none. slots [N]: the row of each choice, M where it has none. choices
    [M]: the choice in each row, N where it has none.
    """

    sizes: jax.Array
    slots: jax.Array
    choices: jax.Array


def group_rows(experts: jax.Array, count: int) -> Groups:
    """Sort choices of `experts` [N], each below `count` or, for none, equal to it, into rows."""
    choices = experts.shape[0]
    order, _, sizes = sort_choices(experts, count)
    row = jnp.arange(choices + block_sizes(choices, count)[-1], dtype=jnp.int32)
    choice = jnp.where(row < jnp.sum(sizes), order.at[row].get(mode="clip"), choices)
    slots = jnp.full((choices,), row.shape[0], jnp.int32).at[choice].set(row, mode="drop")
    return Groups(sizes, slots, choice)


def sort_choices(experts: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Order [N] of the choices by expert, stable, and where each expert's begin and how many they
    are, [count].
    """
    order = jnp.argsort(experts, stable=True)
    bounds = jnp.searchsorted(experts[order], jnp.arange(count + 1))
    return order, bounds[:-1], jnp.diff(bounds)


def block_sizes(choices: int, count: int) -> tuple[int, ...]:
    """Rows of the blocks that an expert's rows are cut into, largest first, all multiples of the
    last. A block costs about 20 rows more than it has, since the matrix is laid out anew for it, so
    an expert that gets up to 1.5 times the even share gets one block, of 256 rows at most, too
    large by half of the smallest on average.
    """
    largest = min(3 * choices // (2 * count), choices)
    step = min(max(-(-largest // 4 // 8) * 8, SMALLEST_STEP), LARGEST_STEP)
    return tuple(step * n for n in range(min(4, max(1, -(-largest // step))), 0, -1))


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


@dataclass(frozen=True)
class _Plan:
    """The static half of `grouped_linear`'s arguments."""

    axes: tuple[tuple[str, ...], ...]
    layout: Layout
    enter: bool
    leave: int | None


def grouped_linear(
    x: jax.Array,
    weights: Weights,
    groups: Groups,
    layout: Layout,
    *,
    enter: bool = False,
    leave: int | None = None,
) -> tuple[jax.Array, ...]:
    """Rows x[M, K] times their experts' matrices of each of `weights` -> [M, F] in x's dtype; rows
    of no choice may hold anything.

    enter: x is [T, K], tokens, whose choices are the rows. leave: give [T, F] in f32, T being
    `leave`, each token's rows added up. So no rows of either are kept for the backward pass, and
    where blocks are multiplied no copies of tokens are written down. Over fsdp each weight is
    gathered in x's dtype, forward and backward, and its gradient reduce-scattered in
    `layout.reduce`.
    """
    return _grouped(x, weights.shards, groups, _Plan(weights.axes, layout, enter, leave))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped(x, shards, groups, plan):
    weights = _gathered(shards, x.dtype, plan)
    ys = lax.platform_dependent(
        x,
        weights,
        groups,
        cpu=partial(_products_by_block, enter=plan.enter),
        default=partial(_products_ragged, enter=plan.enter),
    )
    if plan.leave is None:
        return ys
    return tuple(_collect(y, groups, plan.leave) for y in ys)


def _grouped_forward(x, shards, groups, plan):
    return _grouped(x, shards, groups, plan), (x, shards, groups)


def _grouped_backward(plan, residuals, dys):
    x, shards, groups = residuals
    weights, dys = _gathered(shards, x.dtype, plan), tuple(dy.astype(x.dtype) for dy in dys)
    forms = {"enter": plan.enter, "leave": plan.leave is not None}
    dx, dweights = lax.platform_dependent(
        x,
        weights,
        dys,
        groups,
        cpu=partial(_gradients_by_block, **forms),
        default=partial(_gradients_ragged, **forms),
    )
    if plan.enter:
        dx = _collect(dx, groups, x.shape[0]).astype(x.dtype)
    dshards = tuple(
        scatter_gradient(dweight, axes, shard.dtype, plan.layout)
        for dweight, shard, axes in zip(dweights, shards, plan.axes, strict=True)
    )
    return dx, dshards, None


_grouped.defvjp(_grouped_forward, _grouped_backward)


def _gathered(shards: Any, dtype: Any, plan: _Plan) -> tuple[jax.Array, ...]:
    return tuple(
        gather_weight(shard, names, dtype, plan.layout)
        for shard, names in zip(shards, plan.axes, strict=True)
    )


def _spread(x: jax.Array, groups: Groups) -> Any:
    return spread(x, groups.choices, groups.slots, groups.slots.shape[0] // x.shape[0])


def _collect(rows: jax.Array, groups: Groups, tokens: int) -> Any:
    return collect(rows, groups.choices, groups.slots, groups.slots.shape[0] // tokens)


# --- by ragged_dot -------------------------------------------------------------------------------


def _products_ragged(
    x: jax.Array, weights: Any, groups: Groups, enter: bool
) -> tuple[jax.Array, ...]:
    rows = _spread(x, groups) if enter else x
    return tuple(_ragged_dot(rows, weight, groups).astype(x.dtype) for weight in weights)


def _gradients_ragged(
    x: jax.Array, weights: Any, dys: Any, groups: Groups, enter: bool, leave: bool
) -> tuple[Any, Any]:
    rows = _spread(x, groups) if enter else x
    dys = [_spread(dy, groups) for dy in dys] if leave else dys
    products = [
        _ragged_dot(dy, jnp.swapaxes(weight, 1, 2), groups)
        for dy, weight in zip(dys, weights, strict=True)
    ]
    dims = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    gradient = partial(
        lax.ragged_dot_general,
        group_sizes=groups.sizes,
        ragged_dot_dimension_numbers=dims,
        preferred_element_type=jnp.float32,
    )
    return reduce(jnp.add, products).astype(x.dtype), tuple(gradient(rows, dy) for dy in dys)


def _ragged_dot(x: jax.Array, weight: jax.Array, groups: Groups) -> jax.Array:
    return lax.ragged_dot(x, weight, groups.sizes, preferred_element_type=jnp.float32)


# --- by block ------------------------------------------------------------------------------------


def _products_by_block(
    x: jax.Array, weights: Any, groups: Groups, enter: bool
) -> tuple[jax.Array, ...]:
    """x[M, K], or [T, K] that enters, ·_K weight[E, K, F] of each row's expert -> [M, F]."""

    def one_expert(expert: jax.Array, ys: Any) -> Any:
        matrices = [weight[expert] for weight in weights]

        def one_block(ys: Any, start: jax.Array, rows: int) -> Any:
            block = _block(x, start, rows, groups, enter)
            return tuple(
                _put(y, _dot(block, matrix, 1, 0), start)
                for y, matrix in zip(ys, matrices, strict=True)
            )

        return _over_blocks(one_block, ys, expert, groups)

    rows = groups.choices.shape[0]
    start = tuple(jnp.zeros((rows, weight.shape[2]), x.dtype) for weight in weights)
    return lax.fori_loop(0, groups.sizes.shape[0], one_expert, start)


def _gradients_by_block(
    x: jax.Array, weights: Any, dys: Any, groups: Groups, enter: bool, leave: bool
) -> tuple[Any, Any]:
    """Σ dy[M, F] ·_F weight[E, K, F] of each row's expert -> dx[M, K], and for each weight
    x[M, K] ·_M dy[M, F] over the rows of each expert -> [E, K, F] in f32; x that enters and dys of
    what leaves have T rows.
    """
    ends = jnp.cumsum(groups.sizes)

    def one_expert(expert: jax.Array, gradients: Any) -> Any:
        matrices = [weight[expert] for weight in weights]

        def one_block(gradients: Any, start: jax.Array, rows: int) -> Any:
            dx, dweights = gradients
            dblocks = [_block(dy, start, rows, groups, leave) for dy in dys]
            products = map(partial(_dot, of_a=1, of_b=1), dblocks, matrices)
            own = (start + jnp.arange(rows) < ends[expert])[:, None]  # behind them the next one's
            block = jnp.where(own, _block(x, start, rows, groups, enter), 0)
            block = lax.optimization_barrier(block.T)  # a fast product takes rows, not columns
            return _put(dx, reduce(jnp.add, products), start), tuple(
                dweight.at[expert].add(_dot(block, dblock, 1, 0))
                for dweight, dblock in zip(dweights, dblocks, strict=True)
            )

        return _over_blocks(one_block, gradients, expert, groups)

    start = (
        jnp.zeros((groups.choices.shape[0], x.shape[1]), x.dtype),
        tuple(jnp.zeros(weight.shape, jnp.float32) for weight in weights),
    )
    return lax.fori_loop(0, groups.sizes.shape[0], one_expert, start)


def _over_blocks(
    one_block: Callable[[Any, jax.Array, int], Any], carry: Any, expert: jax.Array, groups: Groups
) -> Any:
    """`one_block(carry, start, rows)` on blocks that cover the expert's rows, in their order: what
    it writes behind the last one's own rows the next expert writes again, or it belongs to none.
    """
    sizes = block_sizes(groups.slots.shape[0], groups.sizes.shape[0])
    start = jnp.cumsum(groups.sizes)[expert] - groups.sizes[expert]
    steps = -(-groups.sizes[expert] // sizes[-1])
    for rows in sizes:
        count = steps // (rows // sizes[-1])

        def one(number: jax.Array, carry: Any, start=start, rows=rows) -> Any:
            return one_block(carry, start + number * rows, rows)

        carry = lax.fori_loop(0, count, one, carry)
        start, steps = start + count * rows, steps - count * (rows // sizes[-1])
    return carry


def _block(x: jax.Array, start: jax.Array, rows: int, groups: Groups, gather: bool) -> jax.Array:
    """x's rows from `start`; of tokens, those whose choices the rows hold."""
    if not gather:
        return lax.dynamic_slice_in_dim(x, start, rows)
    choices = lax.dynamic_slice_in_dim(groups.choices, start, rows)
    token = choices // (groups.slots.shape[0] // x.shape[0])
    return x.at[token].get(mode="fill", fill_value=0)  # an unchosen product may overflow


def _dot(a: jax.Array, b: jax.Array, of_a: int, of_b: int) -> jax.Array:
    dims = (((of_a,), (of_b,)), ((), ()))
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _put(rows: jax.Array, block: jax.Array, start: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(rows, block.astype(rows.dtype), start, 0)
