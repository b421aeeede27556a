"""Tables of pipeline schedules: the papers' ticks, buffers, and gradients from their rows alone."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given

from meshwright.sharding.pipeline.schedules import (
    NAMES,
    PLACEMENTS,
    Op,
    Schedule,
    build_schedule,
    depth_of,
    finish,
    lifetimes,
    read_slot,
    write_slot,
)
from pipelines import SIZES, schedules


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_ticks_are_the_papers(p, m):
    """Every slot one tick. ZB-H1 with four stages and six micro-batches needs 21."""

    def ticks(name, v=None, uniform=False):
        return build_schedule(name, p, m, v, uniform).ticks

    assert ticks("gpipe") == ticks("1f1b") == 2 * (m + p - 1)
    assert ticks("1f1b", uniform=True) == m + 2 * (p - 1)
    assert ticks("zb_h1") == 3 * m + p - 1
    for v in (1, 2, 4):
        assert ticks("interleaved", v) == 2 * (m * v + p - 1)
        assert ticks("interleaved", v, uniform=True) == m * v + p * v + p - 2
    if m >= 2 * p - 1:
        assert ticks("zb_h2") == 3 * m + p - 1
        assert ticks("zb_v") == 6 * m + p - 1
    assert build_schedule("zb_h1", 4, 6).ticks == 21


def test_buffers_of_what_is_known():
    assert build_schedule("gpipe", 4, 8).buffers == {"x": 1, "dy": 8, "stash": 8, "taps": 0}
    assert build_schedule("1f1b", 4, 8).buffers["stash"] == 4
    uniform = build_schedule("1f1b", 4, 8, uniform=True)
    assert uniform.buffers == {"x": 1, "dy": 1, "stash": 7, "taps": 0}
    assert build_schedule("1f1b", 4, 64, uniform=True).buffers == uniform.buffers
    # input gradients of the last stage run at once; the weights' wait up to three more
    assert build_schedule("zb_h1", 4, 8).buffers == {"x": 1, "dy": 1, "stash": 4, "taps": 4}


def execute(schedule: Schedule) -> tuple[dict[tuple[int, int], int], dict[int, int]]:
    """Run a table as a program does, out of nothing but its buffers' rows: y = weight·x + 1 per
    chunk, loss = sum of (micro-batch + 1)·y². Returns the weight gradient of each (stage, chunk)
    and the input gradient of each micro-batch.
    """
    p, v, rows = schedule.stages, schedule.chunks, schedule.rows
    at = {
        depth_of(schedule.placement, p, v, stage, chunk): (stage, chunk)
        for stage in range(p)
        for chunk in range(v)
    }
    memory: dict[tuple[str, int, int], object] = {}  # (buffer, stage, row): one value each
    gradients, inputs = defaultdict(int), {}

    def put(buffer, depth, microbatch, value):
        stage, chunk = at[depth]
        memory[buffer, stage, rows[buffer, stage, microbatch, chunk]] = value

    def get(buffer, depth, microbatch):
        stage, chunk = at[depth]
        return memory[buffer, stage, rows[buffer, stage, microbatch, chunk]]

    for tick in range(schedule.ticks):
        sent = []
        for stage in range(p):
            taps = None  # of a W in the slot of its B
            for op in schedule.table[stage][tick]:
                kind, i, depth = schedule.result(stage, op)
                weight = weight_of(depth)
                if kind == "F":
                    x = get("x", depth, i) if depth else i
                    put("stash", depth, i, x)
                    y = weight * x + 1
                    if depth + 1 < p * v:
                        sent.append(("x", depth + 1, i, y))
                    else:
                        put("dy", depth, i, 2 * (i + 1) * y)
                elif kind == "B":
                    dy = get("dy", depth, i)
                    taps = get("stash", depth, i), dy
                    if ("taps", stage, i, op.chunk) in rows:
                        put("taps", depth, i, taps)
                        taps = None
                    if depth:
                        sent.append(("dy", depth - 1, i, weight * dy))
                    else:
                        inputs[i] = weight * dy
                else:
                    x, dy = taps or get("taps", depth, i)
                    gradients[stage, op.chunk] += x * dy
        for message in sent:
            put(*message)
    return gradients, inputs


def weight_of(depth: int) -> int:
    return 1 + depth % 3


@given(schedule=schedules())
def test_executed_from_its_rows_a_table_gives_the_gradients_of_no_pipeline(schedule):
    p, v, m = schedule.stages, schedule.chunks, schedule.microbatches
    expected, inputs = [0] * (p * v), {}
    for i in range(m):
        xs = [i]
        for depth in range(p * v):
            xs.append(weight_of(depth) * xs[-1] + 1)
        dy = 2 * (i + 1) * xs.pop()
        for depth in reversed(range(p * v)):
            expected[depth] += xs[depth] * dy
            dy *= weight_of(depth)
        inputs[i] = dy
    gradients, computed = execute(schedule)
    assert computed == inputs
    for (stage, chunk), gradient in gradients.items():
        assert gradient == expected[depth_of(schedule.placement, p, v, stage, chunk)]
    assert len(gradients) == p * v


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("p", "v"), [(1, 1), (4, 1), (4, 2), (3, 3)])
def test_a_placement_gives_every_depth_one_place(placement, p, v):
    places = [(stage, chunk) for stage in range(p) for chunk in range(v)]
    depths = [depth_of(placement, p, v, *place) for place in places]
    assert sorted(depths) == list(range(p * v))
    assert v > 1 or depths == list(range(p))


def test_slots_read_what_they_write():
    for text in ("", "F3", "B12.1", "W0", "BW3", "F4+BW3.1", "F4.1+B3+W2", "B3+W3.1"):
        assert write_slot(read_slot(text)) == text
    assert read_slot("F4+BW3.1") == (Op("F", 4), Op("B", 3, 1), Op("W", 3, 1))
    assert write_slot(read_slot("B3+W3")) == "BW3"


def test_finish_takes_no_more_rows_than_wait_at_once():
    """Interval colouring is optimal: rows = the most values alive in one phase."""
    for name in NAMES:
        schedule = build_schedule(name, 3, 6, 2 if name == "interleaved" else None)
        assert finish(name, 6, schedule.chunks, schedule.placement, schedule.table) == schedule
        alive = defaultdict(int)
        for value, (birth, death) in lifetimes(schedule).items():
            for moment in range(birth, death + 1):
                alive[value.buffer, value.stage, moment] += 1
        for buffer, rows in schedule.buffers.items():
            most = [count for (other, *_), count in alive.items() if other == buffer]
            assert rows == max(most, default=0)
