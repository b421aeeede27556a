"""A schedule's table as the executor reads it: arrays of what each stage does in each tick and of
the buffer rows that it reads and writes, and which ticks are one loop. No JAX.
"""

from __future__ import annotations

from itertools import groupby, product

import numpy as np

from .schedules import Op, Schedule, Value

WAYS = (0, 1, -1)
"""Places along `pipe` from one chunk of the model to the next; 0 is the turn of a V."""


def stage_orders(schedule: Schedule) -> dict[str, np.ndarray]:
    """The table by phase. [tick, stage]: whether there is an F, B or W, of which micro-batch, chunk
    and depth, whether of the model's first chunk, the rows of what it reads and writes, and those
    for what arrives at the end of the tick from each of WAYS. [tick]: the micro-batch that `embed`,
    `head` and `embed_backward` run, -1 for none. Taps of a W in the slot of its B pass through the
    row for what nobody waits for.
    """
    places, sizes = find_places(schedule), schedule.buffers
    shape = schedule.ticks, schedule.stages

    def fill(value: bool | int) -> np.ndarray:
        return np.full(shape, value, bool if isinstance(value, bool) else np.int32)

    orders = {kind: fill(False) for kind in "FBW"} | {f"{kind}.first": fill(False) for kind in "FB"}
    orders |= {f"{kind}.{what}": fill(0) for kind in "FBW" for what in ("microbatch", "chunk")}
    orders |= {f"{kind}.taps": fill(sizes["taps"]) for kind in "BW"}
    orders |= {"F.depth": fill(0), "F.x": fill(sizes["x"]), "F.stash": fill(sizes["stash"])}
    # an idle B reads row 0: before the first B of any stage, all have written to theirs
    orders |= {"B.stash": fill(0), "B.dy": fill(0), "head.dy": fill(sizes["dy"])}
    orders |= {arrival(name, by): fill(sizes[name]) for name in ("x", "dy") for by in WAYS}
    for name in ("embed", "head", "embed_backward"):
        orders[name] = np.full(schedule.ticks, -1, np.int32)

    for stage, tick, op in schedule.ops():
        here, depth = (tick, stage), schedule.result(stage, op).depth
        for what, entry in (("", True), (".microbatch", op.microbatch), (".chunk", op.chunk)):
            orders[op.kind + what][here] = entry

        def row(buffer: str, stage: int = stage, chunk: int = op.chunk, op: Op = op) -> int:
            value = Value(buffer, stage, op.microbatch, chunk)
            return schedule.rows.get(value, sizes[buffer])

        if op.kind != "F":
            orders[f"{op.kind}.taps"][here] = row("taps")
        if op.kind == "W":
            continue
        orders[f"{op.kind}.first"][here] = depth == 0
        orders[f"{op.kind}.stash"][here] = row("stash")
        if op.kind == "F":
            orders["F.depth"][here], orders["F.x"][here] = depth, row("x")
            buffer, following, end, first = "x", depth + 1, "head", "embed"
        else:
            orders["B.dy"][here] = row("dy")
            buffer, following, end, first = "dy", depth - 1, "embed_backward", ""
        if first and depth == 0:
            orders[first][tick] = op.microbatch
        if 0 <= following < len(places):
            to, chunk = places[following]
            by = next(by for by in WAYS if (stage + by) % schedule.stages == to)
            orders[arrival(buffer, by)][tick, to] = row(buffer, to, chunk)
        else:
            orders[end][tick] = op.microbatch
            if op.kind == "F":
                orders["head.dy"][here] = row("dy")
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
    head = stage_orders(schedule)["head"]
    first, end = int(np.argmax(head >= 0)), max(t for t, kind in enumerate(kinds) if "F" in kind)
    bounds = (0, first), (first, end + 1), (end + 1, schedule.ticks)
    return [list(range(*bound)) for bound in bounds if bound[0] < bound[1]]


def sent_ways(schedule: Schedule) -> dict[str, list[int]]:
    """The WAYS in which activations (x) and gradients (dy) are ever sent."""
    table, sizes = stage_orders(schedule), schedule.buffers
    return {
        buffer: [by for by in WAYS if (table[arrival(buffer, by)] < sizes[buffer]).any()]
        for buffer in ("x", "dy")
    }


def permutes(schedule: Schedule) -> int:
    """How often a stage sends an activation or a gradient to a neighbour."""
    table, ways = stage_orders(schedule), sent_ways(schedule)
    return sum(
        len(ticks) * sum(by != 0 for by in ways[buffer])
        for ticks in tick_groups(schedule)
        for kind, buffer in (("F", "x"), ("B", "dy"))
        if table[kind][ticks].any()
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


def arrival(buffer: str, by: int) -> str:
    return f"{buffer} sent {by:+}"
