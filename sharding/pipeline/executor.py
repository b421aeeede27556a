"""Runs a schedule's table inside the step's `shard_map`; what a stage computes is an argument.

Every stage runs the same program, a few `lax.scan`s over ticks. Of the phases F, B and W a stage
has in its tick what the table says. In the uniform kind, that of lockstep schedules, a phase that
any stage has runs on all, masked where it is not theirs: its forward is kept by nobody, its
backward pass starts from a zero cotangent and makes zero gradients. So anything may run inside a
stage. In the per-stage kind, that of all other tables, a phase stands in a branch that only the
stages take that have it. There collectives may run whose groups lie on one stage, but no permute,
for which CPU waits for all devices. In both, activations and gradients travel along `pipe` outside
any branch, and embedding and head, which meet all stages, run as the tick alone says.

F stashes what its VJP saves, but for the parameters, which are there anyway: B computes nothing
again that the policy of recomputation does not, and no weight waits in a buffer. Where the table
has any W apart from its B, B leaves the gradients of products by weights to W: see `taps.py`.
Letters: p stages, m micro-batches, v chunks of n layers on a stage, x[...] one micro-batch's
activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..collectives import all_reduce, axis_index, shift
from ..layout import Layout, is_param
from ..taps import Product, find_products, make_taps, weight_gradients, with_taps
from ..traffic import taken
from .orders import arrival, find_places, sent_ways, splits_backward, stage_orders, tick_groups
from .schedules import Schedule

AXIS = "pipe"


class Stages(NamedTuple):
    """What the schedule drives. ends: parameters of embedding and head; chunk: of one chunk's
    layers [n, ...]; piece: one micro-batch's data; depth: of the chunk in the model.
    """

    embed: Callable[[Any, Any], jax.Array]
    """(ends, piece) -> x, the same on all stages"""
    layers: Callable[[Any, jax.Array, Any, Any], tuple[tuple[jax.Array, jax.Array], Any]]
    """(chunk, x, piece, depth) -> (y like x, this device's share of the loss), sums to log"""
    head: Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]]
    """(ends, y, piece) -> this device's share of the loss, sums to log"""


class Totals(NamedTuple):
    """Over all micro-batches, this device's part. sums: to log, of layers and of head; the others
    None of a table without B: gradients of ends and stack; marks [m, ...] of both.
    """

    sums: tuple[Any, Any]
    ends: Any = None
    stack: Any = None
    marks: Any = None


class _Rows(NamedTuple):
    """Buffers [rows, ...]; the last row of each is for what nobody waits for."""

    x: Any
    dy: Any = None
    stash: Any = None
    taps: Any = None


class _Gradients(NamedTuple):
    """Some of a chunk's: numbers of its leaves, and a tree with those leaves alone."""

    numbers: Sequence[int]
    tree: Any


def run_schedule(
    schedule: Schedule,
    stages: Stages,
    ends: Any,
    stack: Any,
    pieces: Any,
    layout: Layout,
    scatter: Callable[[Any], Any] = lambda grads: grads,
    mark: Callable[[Any], jax.Array] | None = None,
) -> Totals:
    """Local. stack: this stage's layers [v·n, ...], chunk after chunk; pieces: [m, ...]. scatter:
    gradients of ends or of a chunk, or of some of its leaves -> what is added up of them. mark: the
    same gradients -> [leaf] f32, of which each micro-batch's maximum is kept.

    n the bytes of x: a stage sends n along `pipe` as often as `permutes` says. Embedding and head
    all-reduce n each for every micro-batch, and once more backward.
    """
    table, ways, v = stage_orders(schedule), sent_ways(schedule), schedule.chunks
    trains = bool(table["B"].any())
    stage = axis_index(AXIS, layout)
    last, _ = find_places(schedule)[-1]
    passes = _chunk_passes(stages, _products(schedule, stages, ends, stack, pieces), trains)

    def add_ends(totals: Totals, grads: Any, microbatch: Any) -> Totals:
        if mark:
            of_ends, of_stack = totals.marks
            totals = totals._replace(marks=(of_ends.at[microbatch].max(mark(grads)), of_stack))
        return totals._replace(ends=jax.tree.map(jnp.add, totals.ends, scatter(grads)))

    def add_chunk(totals: Totals, grads: _Gradients, kind: str, now: dict[str, jax.Array]):
        numbers, tree = grads
        if mark:
            of_ends, of_stack = totals.marks
            new = jnp.where(now[kind], mark(tree), 0.0)
            of_stack = of_stack.at[now[f"{kind}.microbatch"], np.asarray(numbers)].max(new)
            totals = totals._replace(marks=(of_ends, of_stack))
        sums, structure = jax.tree.flatten(totals.stack)
        for number, grad in zip(numbers, jax.tree.leaves(scatter(tree)), strict=True):
            sums[number] = _add_part(sums[number], grad, now[f"{kind}.chunk"], v)
        return totals._replace(stack=jax.tree.unflatten(structure, sums))

    def tick(
        state: tuple[_Rows, Totals], now: dict[str, jax.Array], group: dict[str, np.ndarray]
    ) -> tuple[_Rows, Totals]:
        """One tick. now: this stage's orders; group: those of all stages in the ticks like it."""
        rows, totals = state

        def phase(kind: str, run: Callable[[Any], Any], value: Any) -> Any:
            """`run(value)` on the stages that have an op of this kind; `value` on the others, or
            what `run` makes of it masked. All groups together, each stage has as many as the first.
            """
            if schedule.uniform or group[kind].all():
                return run(value)
            with jax.named_scope(taken(int(group[kind][:, 0].sum()), len(group[kind]))):
                return lax.cond(now[kind], run, lambda value: value, value)

        def sometimes(name: str, run: Callable[[Any, Any], Any], value: Any) -> Any:
            """`run(piece, value)` in the ticks that have this order, `value` in the others."""
            there = group[name] >= 0
            if not there.any():
                return value

            def with_piece(value: Any) -> Any:
                return run(_row(pieces, now[name]), value)

            if there.all():
                return with_piece(value)
            with jax.named_scope(taken(int(there.sum()), len(there))):
                return lax.cond(now[name] >= 0, with_piece, lambda value: value, value)

        def head(piece: Any, value: tuple[Any, Totals]) -> tuple[Any, Totals]:
            waiting, totals = value
            whole = all_reduce(jnp.where(stage == last, y, jnp.zeros_like(y)), AXIS, layout)

            def share(ends: Any, y: jax.Array):
                return stages.head(ends, y, piece)

            if not trains:
                return waiting, _add_sums(totals, head=share(ends, whole)[1])
            one, vjp, sums = jax.vjp(share, ends, whole, has_aux=True)
            grads, dy = vjp(jnp.ones_like(one))
            dy = all_reduce(dy, AXIS, layout)
            totals = add_ends(_add_sums(totals, head=sums), grads, now["head"])
            return _put(waiting, dy, now["head.dy"]), totals

        def embed_backward(piece: Any, totals: Totals) -> Totals:
            first = jnp.where(now["B.first"], dx, jnp.zeros_like(dx))
            (grads,) = jax.vjp(lambda ends: stages.embed(ends, piece), ends)[1](first)
            return add_ends(totals, grads, now["embed_backward"])

        def run_forward(value: tuple[_Rows, Totals, Any]) -> tuple[_Rows, Totals, Any]:
            rows, totals, x = value
            piece, chunk = _row(pieces, now["F.microbatch"]), _part(stack, now["F.chunk"], v)
            y, sums, stash = passes.forward(chunk, x, piece, now["F.depth"])
            kept = jax.tree.map(lambda a: jnp.where(now["F"], a, 0), sums)
            if trains:
                rows = rows._replace(stash=_put(rows.stash, stash, now["F.stash"]))
            return rows, _add_sums(totals, layers=kept), y

        def run_backward(value: tuple[_Rows, Totals, Any]) -> tuple[_Rows, Totals, Any]:
            rows, totals, dy = value
            stash, chunk = _row(rows.stash, now["B.stash"]), _part(stack, now["B.chunk"], v)
            grads, taps, dx = passes.backward(chunk, stash, dy, now["B"])
            if passes.products:
                rows = rows._replace(taps=_put(rows.taps, taps, now["B.taps"]))
            return rows, add_chunk(totals, grads, "B", now), dx

        def run_weights(totals: Totals) -> Totals:
            taps, chunk = _row(rows.taps, now["W.taps"]), _part(stack, now["W.chunk"], v)
            return add_chunk(totals, passes.weights(chunk, taps), "W", now)

        y: Any = None
        dx: Any = None
        if group["F"].any():
            x = _row(rows.x, now["F.x"])
            first = sometimes(
                "embed", lambda piece, _: stages.embed(ends, piece), jnp.zeros_like(x)
            )
            x = jnp.where(now["F.first"], first, x)
            rows, totals, y = phase("F", run_forward, (rows, totals, x))
            dy, totals = sometimes("head", head, (rows.dy, totals))
            rows = rows._replace(dy=dy)
        if group["B"].any():
            rows, totals, dx = phase("B", run_backward, (rows, totals, _row(rows.dy, now["B.dy"])))
            totals = sometimes("embed_backward", embed_backward, totals)
        if passes.products and group["W"].any():
            totals = phase("W", run_weights, totals)
        return _exchange(rows, {"x": y, "dy": dx}, ways, now, layout), totals

    def first_state(ends: Any, stack: Any, pieces: Any) -> tuple[_Rows, Totals]:
        """The state before the first tick, of which only shapes are wanted."""
        piece, chunk = _row(pieces, 0), _part(stack, 0, v)
        x = stages.embed(ends, piece)
        y, sums, stash = passes.forward(chunk, x, piece, 0)
        sums, sizes = (sums, stages.head(ends, y, piece)[1]), schedule.buffers
        if not trains:
            return _Rows(_rows(x, sizes["x"])), Totals(sums)
        taps = make_taps(passes.products, jax.tree.leaves(chunk))
        waiting = ("x", x), ("dy", x), ("stash", stash), ("taps", taps)
        rows = (_rows(a, sizes[name]) for name, a in waiting)
        marks = mark and _rows((mark(ends), mark(chunk)), schedule.microbatches - 1)
        return _Rows(*rows), Totals(sums, scatter(ends), scatter(stack), marks)

    shapes = jax.eval_shape(first_state, ends, stack, pieces)
    state = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    for ticks in tick_groups(schedule):
        group = {name: order[ticks] for name, order in table.items()}
        own = {
            name: jnp.asarray(order) if order.ndim == 1 else jnp.take(jnp.asarray(order), stage, 1)
            for name, order in group.items()
        }
        run = partial(tick, group=group)
        state, _ = lax.scan(lambda state, now, run=run: (run(state, now), None), state, own)
    return state[1]


class _Passes(NamedTuple):
    """Those of one chunk. products: what `backward` leaves for `weights`."""

    products: Sequence[Product]
    forward: Callable[[Any, jax.Array, Any, Any], tuple[jax.Array, Any, list[jax.Array]]]
    """(chunk, x, piece, depth) -> y, sums to log, what B needs beside the parameters"""
    backward: Callable[
        [Any, Sequence[jax.Array], jax.Array, jax.Array], tuple[_Gradients, Any, Any]
    ]
    """(chunk, what F kept, dy, whether there is a B) -> gradients, what W needs, dx"""
    weights: Callable[[Any, Any], _Gradients]
    """(chunk, what B kept) -> gradients"""


def _chunk_passes(stages: Stages, products: Sequence[Product], trains: bool) -> _Passes:
    later = sorted(number for product in products for number in product.weights)
    assert len(set(later)) == len(later)

    def at_once(params: Sequence[Any]) -> list[int]:
        return [number for number in range(len(params)) if number not in later]

    recipes: list[Any] = []  # how B puts a VJP together again: the same for every F

    def forward(chunk: Any, x: jax.Array, piece: Any, depth: Any):
        params, structure = jax.tree.flatten(chunk)
        numbers = at_once(params)

        def layers(some: Any, taps: Any, x: jax.Array):
            leaves = list(params)
            for number, leaf in zip(numbers, jax.tree.leaves(some), strict=True):
                leaves[number] = leaf
            leaves = with_taps(products, leaves, taps)
            return stages.layers(jax.tree.unflatten(structure, leaves), x, piece, depth)

        given = _only(chunk, numbers), make_taps(products, params), x
        if not trains:
            (y, _), sums = layers(*given)
            return y, sums, []
        (y, _), vjp, sums = jax.vjp(layers, *given, has_aux=True)
        saved, tree = jax.tree.flatten(vjp)
        known = {id(leaf): number for number, leaf in enumerate(params)}
        places = [known.get(id(leaf)) for leaf in saved]
        recipes.append((tree, places))
        return y, sums, [a for a, place in zip(saved, places, strict=True) if place is None]

    def backward(chunk: Any, stash: Sequence[jax.Array], dy: jax.Array, active: jax.Array):
        (tree, places), *others = recipes
        assert all(more == places for _, more in others)
        kept, params = iter(stash), jax.tree.leaves(chunk)
        leaves = [next(kept) if place is None else params[place] for place in places]
        masked = jnp.where(active, dy, jnp.zeros_like(dy)), active.astype(jnp.float32)
        some, taps, dx = jax.tree.unflatten(tree, leaves)(masked)
        return _Gradients(at_once(params), some), taps, dx

    def weights(chunk: Any, taps: Any) -> _Gradients:
        grads = weight_gradients(products, jax.tree.leaves(chunk), taps)
        structure = jax.tree.structure(_only(chunk, later))
        return _Gradients(later, jax.tree.unflatten(structure, [grads[n] for n in later]))

    return _Passes(products, forward, backward, weights)


def _products(
    schedule: Schedule, stages: Stages, ends: Any, stack: Any, pieces: Any
) -> list[Product]:
    """What B leaves for W."""
    if not splits_backward(schedule):
        return []

    def layers(chunk: Any) -> Any:
        piece = _row(pieces, 0)
        return stages.layers(chunk, stages.embed(ends, piece), piece, 0)

    return find_products(layers, _part(stack, 0, schedule.chunks))


def _only(tree: Any, numbers: Sequence[int]) -> Any:
    """The tree with no Params but those."""
    params, structure = jax.tree.flatten(tree, is_leaf=is_param)
    kept = (param if number in numbers else None for number, param in enumerate(params))
    return jax.tree.unflatten(structure, kept)


def _exchange(rows: _Rows, sent: dict[str, Any], ways: Any, now: Any, layout: Layout) -> _Rows:
    """y goes to the chunk behind, as its x, dx to the one before, as its dy, on whichever stage
    that is; None is not sent.
    """
    for buffer, value in sent.items():
        for by in ways[buffer] if value is not None else ():
            kept, row = getattr(rows, buffer), now[arrival(buffer, by)]
            rows = rows._replace(**{buffer: _put(kept, shift(value, AXIS, by, layout), row)})
    return rows


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


def _add_sums(totals: Totals, layers: Any = None, head: Any = None) -> Totals:
    more = [
        sums if new is None else jax.tree.map(jnp.add, sums, new)
        for sums, new in zip(totals.sums, (layers, head), strict=True)
    ]
    return totals._replace(sums=tuple(more))
