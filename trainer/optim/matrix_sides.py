"""A parameter as what the model multiplies by: for each layer one matrix [in, out], its heads
merged.

Told nothing, update rules would factor, orthogonalise or take norms over the stack of layers too.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import jax
import optax
from flax import nnx

from ...sharding.layout import map_params


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


def side_size(value: jax.Array, dims: tuple[int, ...]) -> int:
    return math.prod(value.shape[dim] for dim in dims)
