"""A schedule's table as the executor reads it: arrays of what each stage does in each tick and of
the buffer rows that it reads and writes, and which ticks are one loop. No JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, product
from typing import Any, NamedTuple

import numpy as np

from .schedules import Op, Schedule, Value

WAYS = (0, 1, -1)
"""Places along `pipe` from one chunk of the model to the next; 0 is the turn of a V."""


class Forward(NamedTuple):
    """The F of each tick and stage, [tick, stage], or one of them."""

    there: Any
    """whether there is one"""
    microbatch: Any
    chunk: Any
    """which of the stage's chunks"""
    depth: Any
    """which chunk of the model that is"""
    first: Any
    """whether it is the model's first"""
    x: Any
    """the row that it reads"""
    stash: Any
    """the row for what its B needs"""


class Backward(NamedTuple):
    """The B of each tick and stage, likewise."""

    there: Any
    microbatch: Any
    chunk: Any
    first: Any
    dy: Any
    """the row that it reads"""
    stash: Any
    """the row that its F has written"""
    taps: Any
    """the row for what its W needs; that for what nobody waits for where W is in the same slot"""


class Weights(NamedTuple):
    """The W of each tick and stage, likewise."""

    there: Any
    microbatch: Any
    chunk: Any
    taps: Any
    """the row that its B has written"""


class Orders(NamedTuple):
    """What a table has stages do."""

    F: Forward
    B: Backward
    W: Weights
    embed: Any
    """[tick]: the micro-batch that all stages embed together; -1: none"""
    head: Any
    """[tick]: that whose loss they compute"""
    embed_backward: Any
    """[tick]: that whose gradient reaches the embedding"""
    head_dy: Any
    """[tick, stage]: the row for the gradient that the head sends back"""
    arrivals: dict[tuple[str, int], Any]
    """(buffer x or dy, one of WAYS) -> [tick, stage]: the row for what arrives that way at the end
    of the tick"""

    def map(self, change: Callable[[Any], Any]) -> Orders:
        """Every array changed alike."""
        return Orders(
            Forward(*map(change, self.F)),
            Backward(*map(change, self.B)),
            Weights(*map(change, self.W)),
            embed=change(self.embed),
            head=change(self.head),
            embed_backward=change(self.embed_backward),
            head_dy=change(self.head_dy),
            arrivals={way: change(rows) for way, rows in self.arrivals.items()},
        )


def stage_orders(schedule: Schedule) -> Orders:
    """The table by phase. What a stage without the phase reads or writes are rows that are there:
    the last of a buffer is for what nobody waits for.
    """
    places, sizes = find_places(schedule), schedule.buffers
    shape = schedule.ticks, schedule.stages

    def none() -> np.ndarray:
        return np.full(shape, False)

    def rows(first: int = 0) -> np.ndarray:
        return np.full(shape, first, np.int32)

    def together() -> np.ndarray:
        return np.full(schedule.ticks, -1, np.int32)

    # an idle B reads row 0: before the first B of any stage, all have written to theirs
    orders = Orders(
        Forward(none(), rows(), rows(), rows(), none(), rows(sizes["x"]), rows(sizes["stash"])),
        Backward(none(), rows(), rows(), none(), rows(), rows(), rows(sizes["taps"])),
        Weights(none(), rows(), rows(), rows(sizes["taps"])),
        embed=together(),
        head=together(),
        embed_backward=together(),
        head_dy=rows(sizes["dy"]),
        arrivals={(name, by): rows(sizes[name]) for name in ("x", "dy") for by in WAYS},
    )
    for stage, tick, op in schedule.ops():
        here, depth = (tick, stage), schedule.result(stage, op).depth

        def row(buffer: str, stage: int = stage, chunk: int = op.chunk, op: Op = op) -> int:
            value = Value(buffer, stage, op.microbatch, chunk)
            return schedule.rows.get(value, sizes[buffer])

        phase = getattr(orders, op.kind)
        phase.there[here], phase.microbatch[here], phase.chunk[here] = True, op.microbatch, op.chunk
        if op.kind == "F":
            orders.F.depth[here], orders.F.first[here] = depth, depth == 0
            orders.F.x[here], orders.F.stash[here] = row("x"), row("stash")
            buffer, following, end = "x", depth + 1, orders.head
            if depth == 0:
                orders.embed[tick] = op.microbatch
        elif op.kind == "B":
            orders.B.first[here], orders.B.dy[here] = depth == 0, row("dy")
            orders.B.stash[here], orders.B.taps[here] = row("stash"), row("taps")
            buffer, following, end = "dy", depth - 1, orders.embed_backward
        else:
            orders.W.taps[here] = row("taps")
            continue
        if 0 <= following < len(places):
            to, chunk = places[following]
            by = next(by for by in WAYS if (stage + by) % schedule.stages == to)
            orders.arrivals[buffer, by][tick, to] = row(buffer, to, chunk)
        else:
            end[tick] = op.microbatch
            if op.kind == "F":
                orders.head_dy[here] = row("dy")
    return orders


def tick_groups(schedule: Schedule) -> list[list[int]]:
    """Ticks that one scan runs. Uniform: consecutive ones with the same phases, so that nothing is
    masked on all stages. Per stage, where phases are branches: until the first head, until the last
    F, and the rest.
    """
    kinds = [{op.kind for row in schedule.table for op in row[t]} for t in range(schedule.ticks)]
    if schedule.uniform:
        runs = groupby(range(schedule.ticks), key=lambda tick: kinds[tick])
        return [list(ticks) for kind, ticks in runs if kind]
    head = stage_orders(schedule).head
    first, end = int(np.argmax(head >= 0)), max(t for t, kind in enumerate(kinds) if "F" in kind)
    bounds = (0, first), (first, end + 1), (end + 1, schedule.ticks)
    return [list(range(*bound)) for bound in bounds if bound[0] < bound[1]]


def sent_ways(schedule: Schedule, orders: Orders) -> dict[str, Sequence[int]]:
    """The WAYS in which activations (x) and gradients (dy) are ever sent."""
    return {
        buffer: [
            by for by in WAYS if (orders.arrivals[buffer, by] < schedule.buffers[buffer]).any()
        ]
        for buffer in ("x", "dy")
    }


def permutes(schedule: Schedule) -> int:
    """How often a stage sends an activation or a gradient to a neighbour."""
    orders = stage_orders(schedule)
    ways = sent_ways(schedule, orders)
    return sum(
        len(ticks) * sum(by != 0 for by in ways[buffer])
        for ticks in tick_groups(schedule)
        for phase, buffer in ((orders.F, "x"), (orders.B, "dy"))
        if phase.there[ticks].any()
    )


def splits_backward(schedule: Schedule) -> bool:
    """Whether any W stands apart from its B."""
    return any(value.buffer == "taps" for value in schedule.rows)


def find_places(schedule: Schedule) -> list[tuple[int, int]]:
    """(stage, chunk) of each depth."""
    stages, chunks = range(schedule.stages), range(schedule.chunks)
    return sorted(
        product(stages, chunks),
        key=lambda place: schedule.result(place[0], Op("F", 0, place[1])).depth,
    )
