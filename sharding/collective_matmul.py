"""Collective matmul (Wang et al., ASPLOS'23, doi 10.1145/3567955.3567959): a sequence that is cut
over a mesh axis meets a product chunk by chunk, each chunk multiplied while another travels.

N devices along the axis, each owner of one chunk. Chunks to be multiplied, and sums of products,
go round a ring of neighbours: all one way in N-1 hops, or both ways at once in N/2. Either way N-1
permutes of one chunk: the bytes of the all-gather or reduce-scatter that they replace. The loops
are unrolled, so that XLA may put any product between a permute's start and its end.

What is multiplied is the caller's: a function of arrays with dim `dim`, tokens, that treats each
token apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .collectives import axis_index, shift
from .layout import Layout


def gather_matmul(
    function: Callable[[Any, Any], tuple[Any, Any]],
    cut: Any,
    whole: Any,
    axis: str,
    dim: int,
    layout: Layout,
) -> tuple[Any, Any]:
    """`function(all_gather(cut), whole)`, without the all-gather.

    cut: tree of A[.., S_axis, ..]; whole: tree of B[.., S, ..]. `function` gets one chunk of each
    and returns (ys, sums): ys [.., S_axis, ..] are joined to [.., S, ..], sums are added up. The
    next chunk is sent before one is used. Sends (N-1)/N·n of the gathered A.
    """
    owners, ys, total = [], [], None
    for owner, chunk in _chunks(cut, axis, layout):
        y, sums = function(chunk, _take(whole, owner, axis, dim, layout))
        # without the barrier XLA keeps all N sums and adds them up at the end
        total = lax.optimization_barrier(_add(total, sums)) if owners else sums
        owners.append(owner)
        ys.append(y)
    return jax.tree.map(partial(_join, owners, dim), *ys), total


def matmul_scatter(
    function: Callable[[Any], Any], whole: Any, axis: str, dim: int, layout: Layout
) -> Any:
    """`reduce_scatter(function(whole))`, without the reduce-scatter.

    whole: tree of A[.., S, ..] -> tree of [.., S_axis, ..], each chunk the sum of all devices'
    `function(chunk)`. A sum sets out where its owner is furthest and takes up a product at each
    device on its way, made while it travels there; it is rounded to the function's dtype at each
    hop. Sends (N-1)/N·n of the function's result.
    """

    def product(owner: jax.Array | int, arriving: list[Any]) -> Any:
        part = function(_take(whole, owner, axis, dim, layout))
        if arriving:
            # without the barrier XLA adds inside the product, which then waits for what arrives
            part = lax.optimization_barrier(part)
        return reduce(_add, arriving, part)

    me = axis_index(axis, layout)
    ahead, behind = _hops(axis, layout)
    arriving = {1: [], -1: []}
    for distance in range(ahead, 0, -1):
        for way, hops in ((1, ahead), (-1, behind)):
            if distance <= hops:
                part = product(me + way * distance, arriving[way])
                arriving[way] = [shift(part, axis, way, layout)]
    return product(me, arriving[1] + arriving[-1])


def _chunks(cut: Any, axis: str, layout: Layout) -> Iterator[tuple[jax.Array | int, Any]]:
    """Every device's chunk with its owner, this device's own first."""
    me = axis_index(axis, layout)
    ahead, behind = _hops(axis, layout)
    here, held = [(me, cut)], {1: cut, -1: cut}
    for distance in range(1, ahead + 1):
        arriving = []
        for way, hops in ((1, ahead), (-1, behind)):
            if distance <= hops:
                held[way] = shift(held[way], axis, way, layout)
                arriving.append((me - way * distance, held[way]))
        yield from here
        here = arriving
    yield from here


def _hops(axis: str, layout: Layout) -> tuple[int, int]:
    """How far chunks travel ahead and behind, N-1 together."""
    hops = layout.size(axis) - 1
    behind = hops // 2 if layout.config.overlap == "bidirectional" else 0
    return hops - behind, behind


def _take(whole: Any, owner: jax.Array | int, axis: str, dim: int, layout: Layout) -> Any:
    """The owner's chunk of every A[.., S, ..]; owners are counted round the ring."""
    size = layout.size(axis)

    def one(a: jax.Array) -> jax.Array:
        length = a.shape[dim] // size
        return lax.dynamic_slice_in_dim(a, owner % size * length, length, dim)

    return jax.tree.map(one, whole)


def _join(owners: list[jax.Array | int], dim: int, *chunks: jax.Array) -> jax.Array:
    """Chunks [.., S_axis, ..] in their owners' places of [.., S, ..]."""
    size, length = len(chunks), chunks[0].shape[dim]
    shape = list(chunks[0].shape)
    shape[dim] = size * length
    whole = jnp.zeros(shape, chunks[0].dtype)
    for owner, chunk in zip(owners, chunks, strict=True):
        whole = lax.dynamic_update_slice_in_dim(whole, chunk, owner % size * length, dim)
    return whole


def _add(tree: Any, other: Any) -> Any:
    return jax.tree.map(jnp.add, tree, other)
