"""Where gradients meet: after the backward pass each device holds its share of every gradient it
can see, and this file adds the shares up over the mesh, in `layout.reduce`. The only reductions of
gradients outside `linear.py` are here.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from .collectives import all_reduce, reduce_scatter
from .layout import Layout, entry_axes, spec_axes

UNREDUCED_AXES = ("replica",)
"""Axes whose devices train apart (DiLoCo): their gradients never meet."""


def reduced_axes(layout: Layout) -> tuple[str, ...]:
    """Mesh axes over which shares of gradients, and of what is logged, add up."""
    return tuple(axis for axis in layout.mesh.axis_names if axis not in UNREDUCED_AXES)


def scatter_gradients(grads: Any, in_specs: Any, out_specs: Any, layout: Layout) -> Any:
    """Reduce-scatter each leaf over the mesh axes that its out_spec names and its in_spec does not.

    g[D]{partial over fsdp} -> g[D_fsdp]: the half of the reduction that ZeRO-1 does once and ZeRO-2
    per micro-batch (arXiv 1910.02054). Sends (N-1)/N·n.
    """

    def one(grad: jax.Array, in_spec: P, out_spec: P) -> jax.Array:
        for dim, entry in enumerate(out_spec):
            new = tuple(axis for axis in entry_axes(entry) if axis not in spec_axes(in_spec))
            grad = reduce_scatter(grad, new, dim, layout, layout.reduce)
        return grad

    return jax.tree.map(one, grads, in_specs, out_specs)


def reduce_gradients(grads: Any, in_specs: Any, out_specs: Any, layout: Layout) -> Any:
    """Add the devices' shares of each gradient leaf up: in_specs, out_specs like grads, of the
    shard_map's inputs and outputs.

    A mesh axis that the in_spec names is reduced already, by the transposed gather inside the
    backward pass (ZeRO-3) or because each device owns its part (tensor). One that only the out_spec
    names is reduce-scattered, and every other one all-reduced: 2(N-1)/N·n. After ZeRO-3's
    reduce-scatter that leaves the slow `data` axis of hybrid sharding n/fsdp bytes (2304.11277).
    """

    def one(grad: jax.Array, spec: P) -> jax.Array:
        missing = tuple(axis for axis in reduced_axes(layout) if axis not in spec_axes(spec))
        return all_reduce(grad, missing, layout, layout.reduce)

    return jax.tree.map(one, scatter_gradients(grads, in_specs, out_specs, layout), out_specs)
