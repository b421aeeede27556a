"""The collective vocabulary: what may move between devices, by name, inside the step's `shard_map`.

Notation: A[B_X, D] has dim B cut over mesh axis X; {partial over Y} means that the sum over Y is
still to come. n is the bytes of the full array, N the devices along the axes; each docstring says
what one device sends. Under autodiff each function transposes to its partner (all_reduce to itself,
all_gather to reduce_scatter, shift and all_to_all to the way back), which makes cotangents shares
as well: see "sum of shares" in docs/design.md.

An axis of size 1 returns its input: XLA keeps size-1 collectives on CPU. Nothing else tests sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax

from .layout import Layout


def _wide(axes: str | Sequence[str], layout: Layout) -> tuple[str, ...]:
    axes = (axes,) if isinstance(axes, str) else axes
    return tuple(axis for axis in axes if layout.size(axis) > 1)


def all_reduce(tree, axes: str | Sequence[str], layout: Layout, dtype: Any = None):
    """A{partial over axes} -> A, for every leaf of a tree. Sends 2(N-1)/N·n, and adds up, in
    `dtype` (default: each leaf's own).
    """
    wide = _wide(axes, layout)
    return _in_dtype(lambda tree: lax.psum(tree, wide), tree, dtype) if wide else tree


def all_reduce_max(x: jax.Array, axes: str | Sequence[str], layout: Layout) -> jax.Array:
    """Elementwise maximum over the axes. Sends 2(N-1)/N·n. Not differentiable."""
    wide = _wide(axes, layout)
    return lax.pmax(x, wide) if wide else x


def all_gather(x: jax.Array, axes: str | Sequence[str], dim: int, layout: Layout) -> jax.Array:
    """A[.., D_axes, ..] -> A[.., D, ..] along `dim`. Sends (N-1)/N·n."""
    wide = _wide(axes, layout)
    return lax.all_gather(x, wide, axis=dim, tiled=True) if wide else x


def reduce_scatter(
    x: jax.Array, axes: str | Sequence[str], dim: int, layout: Layout, dtype: Any = None
) -> jax.Array:
    """A[.., D, ..]{partial over axes} -> A[.., D_axes, ..] along `dim`. Sends (N-1)/N·n, and adds
    up, in `dtype` (default: x's own).

    An axis that goes along several sides of a torus is scattered over one side at a time: XLA for
    TPU makes of a scatter over two an all-reduce, which sends twice as much, and cuts a piece off.
    """
    wide = _wide(axes, layout)
    if not wide:
        return x
    scatter = partial(lax.psum_scatter, axis_name=wide, scatter_dimension=dim, tiled=True)

    def scatter_by_side(x: jax.Array) -> jax.Array:
        for groups in _side_groups(sides):
            x = scatter(x, axis_index_groups=groups)
        return x

    sides = dict(layout.sides).get(wide[0], ()) if len(wide) == 1 else ()
    return _in_dtype(scatter_by_side if sides else scatter, x, dtype)


def _side_groups(sides: Sequence[int]) -> list[list[list[int]]]:
    """For each side, the outer one first, the places on an axis that differ along it alone."""
    places = np.arange(math.prod(sides)).reshape(sides)
    lines = (np.moveaxis(places, side, -1) for side in range(len(sides)))
    return [line.reshape(-1, line.shape[-1]).tolist() for line in lines]


def _in_dtype(collective: Callable[[Any], Any], tree: Any, dtype: Any) -> Any:
    """The collective of the leaves cast to `dtype`, cast back."""
    if dtype is None:
        return collective(tree)
    moved = collective(jax.tree.map(lambda leaf: leaf.astype(dtype), tree))
    return jax.tree.map(lambda leaf, moved: moved.astype(leaf.dtype), tree, moved)


def shift(tree, axis: str, by: int, layout: Layout):
    """Every leaf A goes to the device `by` places further along the axis, round its ring; a
    negative `by` goes back, and one of whole rounds nowhere. Sends the bytes of A.
    """
    size = layout.size(axis)
    pairs = [(place, (place + by) % size) for place in range(size)]
    return lax.ppermute(tree, axis, pairs) if by % size else tree


def all_to_all(tree, axis: str, group: int, split: int, join: int, layout: Layout):
    """Every leaf A[.., S_axis, .., H, ..] -> A[.., S, .., H_axis, ..]: dim `split` is cut and dim
    `join` made whole, among each `group` neighbours along the axis. Sends (N-1)/N of the bytes of
    the device's A, N = group.
    """
    size = layout.size(axis)
    groups = [list(range(first, first + group)) for first in range(0, size, group)]
    exchange = partial(lax.all_to_all, axis_name=axis, split_axis=split, concat_axis=join)
    exchange = partial(exchange, axis_index_groups=groups, tiled=True)
    return jax.tree.map(exchange, tree) if group > 1 else tree


def all_to_all_rows(tree, axes: Sequence[str], layout: Layout):
    """Every leaf A[N·C, ..], C rows for each of the N devices along the axes, first axis major ->
    the C rows from each, in the same order. Sends (N-1)/N of the bytes of A.
    """
    wide = _wide(axes, layout)
    exchange = partial(lax.all_to_all, axis_name=wide, split_axis=0, concat_axis=0, tiled=True)
    return jax.tree.map(exchange, tree) if wide else tree


def axis_index(axes: str | Sequence[str], layout: Layout) -> jax.Array | int:
    """This device's place along the axes, the first one major."""
    wide = _wide(axes, layout)
    return lax.axis_index(wide) if wide else 0
