"""Runs a schedule's table inside the step's `shard_map`; what a stage computes is an argument.

Every stage runs the same program, a few `lax.scan`s over ticks. Of the phases F, B and W a stage
has in its tick what the table says. In the uniform kind, that of lockstep schedules, a phase that
any stage has runs on all, masked where it is not theirs: its forward is kept by nobody, its
backward pass starts from a zero cotangent and makes zero gradients. So anything may run inside a
stage. In the per-stage kind, that of all other tables, a phase stands in a branch that only the
stages take that have it. There collectives may run whose groups lie on one stage, but no permute,
for which CPU waits for all devices. In both, activations and gradients travel along `pipe` outside
any branch, and embedding and head, which meet all stages, run as the tick alone says.

B computes nothing of a layer again that the policy of recomputation does not: F stashes what its
backward pass needs (`passes.py`). Where the table has any W apart from its B, B leaves the
gradients of products by weights to W (`taps.py`). Letters: p stages, m micro-batches, v chunks of n
layers on a stage, x[...] one micro-batch's activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..collectives import all_reduce, axis_index, shift
from ..layout import Layout
from ..taps import find_products, make_taps
from ..traffic import taken
from .orders import (
    Backward,
    Forward,
    Orders,
    Weights,
    find_places,
    sent_ways,
    splits_backward,
    stage_orders,
    tick_groups,
)
from .passes import Gradients, Passes, trace_forward, trace_passes
from .schedules import Schedule

AXIS = "pipe"

Mark = Callable[[Any], jax.Array]
"""Gradients of ends or of a chunk, or of some of its leaves -> [leaf] f32."""


class Stages(NamedTuple):
    """What the schedule drives: the parts of a model, all local."""

    embed: Callable[[Any, Any], jax.Array]
    """(ends, piece) -> x, the same on all stages. ends: parameters of embedding and head; piece:
    one micro-batch's data"""
    layers: Callable[[Any, jax.Array, Any, Any], tuple[tuple[jax.Array, jax.Array], Any]]
    """(chunk, x, piece, depth) -> (y like x, this device's share of the loss), sums to log. chunk:
    parameters of one chunk's layers [n, ...]; depth: of that chunk in the model"""
    head: Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]]
    """(ends, y, piece) -> this device's share of the loss, sums to log"""


class Totals(NamedTuple):
    """Over all micro-batches, this device's part. Of a table without B sums alone."""

    layer_sums: Any
    """what layers log"""
    head_sums: Any
    """what the head logs"""
    ends: Any = None
    """gradients of embedding and head"""
    stack: Any = None
    """gradients of this stage's layers"""
    ends_marks: Any = None
    """[m, leaf of ends]"""
    stack_marks: Any = None
    """[m, leaf of stack]"""


class _Buffers(NamedTuple):
    """What waits on this stage, [rows, ...]; the last row of each is for what nobody waits for."""

    x: Any
    """activations, for their F"""
    dy: Any = None
    """their gradients, for their B"""
    stash: Any = None
    """what an F hands over to its B"""
    taps: Any = None
    """what a B leaves for its W"""


def run_schedule(
    schedule: Schedule,
    stages: Stages,
    ends: Any,
    stack: Any,
    pieces: Any,
    layout: Layout,
    scatter: Callable[[Any], Any] = lambda grads: grads,
    mark: Mark | None = None,
) -> Totals:
    """Local. stack: this stage's layers [v·n, ...], chunk after chunk; pieces: [m, ...]. scatter:
    gradients of ends or of a chunk, or of some of its leaves -> what is added up of them. mark: of
    the same gradients each micro-batch's maximum is kept.

    n the bytes of x: a stage sends n along `pipe` as often as `permutes` says. Embedding and head
    all-reduce n each for every micro-batch, and once more backward.
    """
    orders, stage = stage_orders(schedule), axis_index(AXIS, layout)
    passes = _trace(schedule, stages, ends, stack, pieces)
    run = _Executor(
        schedule, stages, ends, stack, pieces, layout, scatter, mark, passes, stage,
        last=find_places(schedule)[-1][0], ways=sent_ways(schedule, orders),
        trains=bool(orders.B.there.any()),
    )  # fmt: skip

    def own(order: np.ndarray) -> jax.Array:
        whole = jnp.asarray(order)
        return whole if order.ndim == 1 else jnp.take(whole, stage, 1)

    state = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(run.first_state))
    for ticks in tick_groups(schedule):
        group = orders.map(lambda order, ticks=ticks: order[ticks])
        tick = partial(run.tick, group)
        state, _ = lax.scan(lambda state, now, tick=tick: (tick(now, *state), None), state,
                            group.map(own))  # fmt: skip
    return state[1]


def _trace(schedule: Schedule, stages: Stages, ends: Any, stack: Any, pieces: Any) -> Passes:
    """The passes of a chunk of this schedule."""
    piece, chunk = _row(pieces, 0), _part(stack, 0, schedule.chunks)
    x = jax.eval_shape(stages.embed, ends, piece)
    if all(op.kind == "F" for _, _, op in schedule.ops()):
        return trace_forward(stages.layers, chunk, x, piece)
    products = []
    if splits_backward(schedule):
        products = find_products(lambda chunk: stages.layers(chunk, jnp.zeros(x.shape, x.dtype),
                                                             piece, 0), chunk)  # fmt: skip
    return trace_passes(stages.layers, products, chunk, x, piece)


@dataclass(frozen=True)
class _Executor:
    """One stage's program. The methods are the phases of a tick, each of which takes its orders."""

    schedule: Schedule
    stages: Stages
    ends: Any
    stack: Any
    pieces: Any
    layout: Layout
    scatter: Callable[[Any], Any]
    mark: Mark | None
    passes: Passes
    stage: Any
    """which this is"""
    last: int
    """the stage of the model's last chunk"""
    ways: dict[str, Sequence[int]]
    trains: bool

    def tick(
        self, group: Orders, now: Orders, buffers: _Buffers, totals: Totals
    ) -> tuple[_Buffers, Totals]:
        """One tick. now: this stage's orders; group: those of all stages in the ticks like it."""
        y = dx = None
        if group.F.there.any():
            x = self.entering(group, now, buffers)
            forward = partial(self.forward, now.F)
            buffers, totals, y = self.phase(group.F, now.F, forward, (buffers, totals, x))
            dy, totals = self.sometimes(
                group.head, now.head, partial(self.head, now, y), (buffers.dy, totals)
            )
            buffers = buffers._replace(dy=dy)
        if group.B.there.any():
            dy = _row(buffers.dy, now.B.dy)
            backward = partial(self.backward, now.B)
            buffers, totals, dx = self.phase(group.B, now.B, backward, (buffers, totals, dy))
            totals = self.sometimes(
                group.embed_backward, now.embed_backward,
                partial(self.embed_backward, now, dx), totals,
            )  # fmt: skip
        if self.passes.products and group.W.there.any():
            weights = partial(self.weights, now.W, buffers)
            totals = self.phase(group.W, now.W, weights, totals)
        return self.exchange(now, buffers, y, dx), totals

    def phase(self, group: Any, now: Any, run: Callable[[Any], Any], value: Any) -> Any:
        """`run(value)` on the stages that have an op of this kind; `value` on the others, or what
        `run` makes of it masked. All ticks together, each stage has as many as the first.
        """
        if self.schedule.uniform or group.there.all():
            return run(value)
        with jax.named_scope(taken(int(group.there[:, 0].sum()), len(group.there))):
            return lax.cond(now.there, run, lambda value: value, value)

    def sometimes(
        self, group: np.ndarray, now: Any, run: Callable[[Any, Any], Any], value: Any
    ) -> Any:
        """`run(piece, value)` in the ticks that name a micro-batch, on all stages; `value` in the
        others.
        """
        there = group >= 0
        if not there.any():
            return value

        def with_piece(value: Any) -> Any:
            return run(_row(self.pieces, now), value)

        if there.all():
            return with_piece(value)
        with jax.named_scope(taken(int(there.sum()), len(there))):
            return lax.cond(now >= 0, with_piece, lambda value: value, value)

    def entering(self, group: Orders, now: Orders, buffers: _Buffers) -> jax.Array:
        """The activations that F takes: those that have arrived, or the embedding's."""
        x = _row(buffers.x, now.F.x)

        def embed(piece: Any, _: jax.Array) -> jax.Array:
            return self.stages.embed(self.ends, piece)

        first = self.sometimes(group.embed, now.embed, embed, jnp.zeros_like(x))
        return jnp.where(now.F.first, first, x)

    def forward(self, now: Forward, value: tuple[_Buffers, Totals, jax.Array]) -> Any:
        """F: -> buffers, totals, y."""
        buffers, totals, x = value
        piece, chunk = _row(self.pieces, now.microbatch), self.chunk(now.chunk)
        y, sums, stash = self.passes.forward(chunk, x, piece, now.depth)
        kept = jax.tree.map(lambda a: jnp.where(now.there, a, 0), sums)
        if self.trains:
            buffers = buffers._replace(stash=_put(buffers.stash, stash, now.stash))
        totals = totals._replace(layer_sums=jax.tree.map(jnp.add, totals.layer_sums, kept))
        return buffers, totals, y

    def head(
        self, now: Orders, y: jax.Array, piece: Any, value: tuple[Any, Totals]
    ) -> tuple[Any, Totals]:
        """The loss of what has left the last chunk, and its gradient: -> buffer of dy, totals."""
        waiting, totals = value
        own = jnp.where(self.stage == self.last, y, jnp.zeros_like(y))
        whole = all_reduce(own, AXIS, self.layout)

        def share(ends: Any, y: jax.Array) -> tuple[jax.Array, Any]:
            return self.stages.head(ends, y, piece)

        if not self.trains:
            return waiting, _log_head(totals, share(self.ends, whole)[1])
        one, vjp, sums = jax.vjp(share, self.ends, whole, has_aux=True)
        grads, dy = vjp(jnp.ones_like(one))
        dy = all_reduce(dy, AXIS, self.layout)
        totals = self.add_ends(_log_head(totals, sums), grads, now.head)
        return _put(waiting, dy, now.head_dy), totals

    def backward(self, now: Backward, value: tuple[_Buffers, Totals, jax.Array]) -> Any:
        """B: -> buffers, totals, dx."""
        buffers, totals, dy = value
        stash, chunk = _row(buffers.stash, now.stash), self.chunk(now.chunk)
        grads, taps, dx = self.passes.backward(chunk, stash, dy, now.there)
        if self.passes.products:
            buffers = buffers._replace(taps=_put(buffers.taps, taps, now.taps))
        return buffers, self.add_chunk(totals, grads, now), dx

    def embed_backward(self, now: Orders, dx: jax.Array, piece: Any, totals: Totals) -> Totals:
        """The embedding's gradient, of what has left the first chunk backward."""
        first = jnp.where(now.B.first, dx, jnp.zeros_like(dx))
        _, vjp = jax.vjp(lambda ends: self.stages.embed(ends, piece), self.ends)
        (grads,) = vjp(first)
        return self.add_ends(totals, grads, now.embed_backward)

    def weights(self, now: Weights, buffers: _Buffers, totals: Totals) -> Totals:
        """W: the gradients that B has left."""
        taps, chunk = _row(buffers.taps, now.taps), self.chunk(now.chunk)
        return self.add_chunk(totals, self.passes.weights(chunk, taps), now)

    def exchange(self, now: Orders, buffers: _Buffers, y: Any, dx: Any) -> _Buffers:
        """y goes to the chunk behind, as its x, dx to the one before, as its dy, on whichever stage
        that is; None is not sent.
        """
        for name, value in (("x", y), ("dy", dx)):
            for by in self.ways[name] if value is not None else ():
                arrived, row = shift(value, AXIS, by, self.layout), now.arrivals[name, by]
                buffers = buffers._replace(**{name: _put(getattr(buffers, name), arrived, row)})
        return buffers

    def chunk(self, number: Any) -> Any:
        return _part(self.stack, number, self.schedule.chunks)

    def add_ends(self, totals: Totals, grads: Any, microbatch: Any) -> Totals:
        if self.mark:
            marks = totals.ends_marks.at[microbatch].max(self.mark(grads))
            totals = totals._replace(ends_marks=marks)
        return totals._replace(ends=jax.tree.map(jnp.add, totals.ends, self.scatter(grads)))

    def add_chunk(self, totals: Totals, grads: Gradients, now: Backward | Weights) -> Totals:
        if self.mark:
            new = jnp.where(now.there, self.mark(grads.tree), 0.0)
            marks = totals.stack_marks.at[now.microbatch, np.asarray(grads.numbers)].max(new)
            totals = totals._replace(stack_marks=marks)
        sums, structure = jax.tree.flatten(totals.stack)
        scattered = jax.tree.leaves(self.scatter(grads.tree))
        for number, grad in zip(grads.numbers, scattered, strict=True):
            sums[number] = _add_part(sums[number], grad, now.chunk, self.schedule.chunks)
        return totals._replace(stack=jax.tree.unflatten(structure, sums))

    def first_state(self) -> tuple[_Buffers, Totals]:
        """The state before the first tick, of which only shapes are wanted."""
        piece, chunk = _row(self.pieces, 0), self.chunk(0)
        x = self.stages.embed(self.ends, piece)
        y, sums, stash = self.passes.forward(chunk, x, piece, jnp.int32(0))
        sums, sizes = (sums, self.stages.head(self.ends, y, piece)[1]), self.schedule.buffers
        if not self.trains:
            return _Buffers(_rows(x, sizes["x"])), Totals(*sums)
        taps = make_taps(self.passes.products, jax.tree.leaves(chunk))
        buffers = _Buffers(
            _rows(x, sizes["x"]),
            _rows(x, sizes["dy"]),
            _rows(stash, sizes["stash"]),
            _rows(taps, sizes["taps"]),
        )
        totals = Totals(*sums, self.scatter(self.ends), self.scatter(self.stack))
        if self.mark:
            marked = self.mark(self.ends), self.mark(chunk)
            marks = _rows(marked, self.schedule.microbatches - 1)
            totals = totals._replace(ends_marks=marks[0], stack_marks=marks[1])
        return buffers, totals


def _log_head(totals: Totals, sums: Any) -> Totals:
    return totals._replace(head_sums=jax.tree.map(jnp.add, totals.head_sums, sums))


def _rows(tree: Any, rows: int) -> Any:
    """[...] -> [rows + 1, ...]: the last is for what nobody waits for."""
    return jax.tree.map(lambda a: jnp.zeros((rows + 1, *a.shape), a.dtype), tree)


def _row(tree: Any, row: Any) -> Any:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, row, 0, keepdims=False), tree)


def _put(tree: Any, values: Any, row: Any) -> Any:
    return jax.tree.map(lambda a, b: lax.dynamic_update_index_in_dim(a, b, row, 0), tree, values)


def _part(tree: Any, part: Any, parts: int) -> Any:
    """[parts·n, ...] -> [n, ...]"""
    if parts == 1:
        return tree

    def one(a: jax.Array) -> jax.Array:
        n = a.shape[0] // parts
        return lax.dynamic_slice_in_dim(a, part * n, n)

    return jax.tree.map(one, tree)


def _add_part(tree: Any, values: Any, part: Any, parts: int) -> Any:
    """[parts·n, ...] with [n, ...] added to one part."""
    if parts == 1:
        return jax.tree.map(jnp.add, tree, values)
    added = jax.tree.map(jnp.add, _part(tree, part, parts), values)
    return jax.tree.map(
        lambda a, b: lax.dynamic_update_slice_in_dim(a, b, part * b.shape[0], 0), tree, added
    )
