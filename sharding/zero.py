"""ZeRO between a parameter and its optimizer state (arXiv 1910.02054): each device updates the part
of a parameter whose state it holds, and gathers the whole again where parameters rest whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .collectives import all_gather, axis_index
from .layout import Layout, entry_axes, map_params, spec_axes


def own_parts(params: Any, layout: Layout) -> Any:
    """Local: params, as they rest -> the parts of them that `Layout.state_spec` gives this device.
    Sends nothing.
    """

    def part(value: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
        rows = value.shape[dim] // layout.size(axes)
        first = axis_index(axes, layout) * rows
        return jax.lax.dynamic_slice_in_dim(value, first, rows, dim)

    return _where_state_is_cut(part, params, layout)


def whole_params(own: Any, layout: Layout) -> Any:
    """Local: the parts that devices have updated -> parameters as they rest. Stages 1 and 2 send
    (N-1)/N·n here, stages 0 and 3 nothing.
    """
    return _where_state_is_cut(lambda v, axes, dim: all_gather(v, axes, dim, layout), own, layout)


def _where_state_is_cut(
    move: Callable[[jax.Array, tuple[str, ...], int], jax.Array], params: Any, layout: Layout
) -> Any:
    """`move(value, axes, dim)` for each dim that the state's spec cuts over mesh axes which the
    parameter's does not name.
    """

    def one(param: Any) -> jax.Array:
        value = param.get_value()
        stack = value.ndim - len(param.axes)
        at_rest = spec_axes(layout.param_spec(param.axes, stack))
        for dim, entry in enumerate(layout.state_spec(param.axes, stack)):
            axes = tuple(axis for axis in entry_axes(entry) if axis not in at_rest)
            if layout.size(axes) > 1:
                value = move(value, axes, dim)
        return value

    return map_params(one, params)
