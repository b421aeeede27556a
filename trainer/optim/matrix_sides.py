"""A parameter as what the model multiplies by: for each layer one matrix [in, out], its heads
merged, of which each device may hold a part.

Told nothing, update rules would factor, orthogonalise or take norms over the stack of layers too,
and over a device's part instead of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from ...sharding.collectives import all_reduce
from ...sharding.layout import Layout, entry_axes


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


def side_size(value: jax.Array, dims: Sequence[int]) -> int:
    return math.prod(value.shape[dim] for dim in dims)


def mesh_axes(param: nnx.Param, dims: Sequence[int], layout: Layout | None) -> tuple[str, ...]:
    """Mesh axes over which an update of `param` is cut along `dims`, counted from the last. Without
    a layout it is whole.
    """
    if layout is None:
        return ()
    spec = layout.state_spec(param.axes)
    return tuple(axis for dim in dims for axis in entry_axes(spec[dim]))


def mean_over(
    param: nnx.Param, value: jax.Array, dims: Sequence[int], layout: Layout | None
) -> jax.Array:
    """Local: the mean over some dims, counted from the last, of the whole that `value`, laid out
    like an update of `param`, is a part of; those dims have size 1. One all-reduce.
    """
    mean, axes = jnp.mean(value, dims, keepdims=True), mesh_axes(param, dims, layout)
    if layout is None or not axes:
        return mean
    return all_reduce(mean, axes, layout) / layout.size(axes)


def layer_rms(param: nnx.Param, value: jax.Array, layout: Layout | None) -> jax.Array:
    """Local: the root mean square of each layer's parameter, as `mean_over`."""
    dims = tuple(range(-len(param.axes), 0))
    return jnp.sqrt(mean_over(param, value * value, dims, layout))
