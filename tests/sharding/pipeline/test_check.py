"""The checker accepts every builder's table and names what is wrong with any other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.sharding.pipeline.check import check_schedule
from meshwright.sharding.pipeline.schedules import (
    Op,
    Schedule,
    build_schedule,
    lifetimes,
)
from pipelines import schedules


@given(schedule=schedules())
def test_builders_tables_pass(schedule):
    check_schedule(schedule)
    assert sum(len(slot) for row in schedule.table for slot in row) == (
        3 * schedule.stages * schedule.chunks * schedule.microbatches
    )


def changed(schedule: Schedule, cells: dict[tuple[int, int], tuple[Op, ...]]) -> Schedule:
    table = [list(row) for row in schedule.table]
    for (stage, tick), slot in cells.items():
        table[stage][tick] = slot
    return replace(schedule, table=tuple(map(tuple, table)))


def refusal(schedule: Schedule) -> str:
    with pytest.raises(ValueError) as caught:
        check_schedule(schedule)
    reason = str(caught.value)
    assert "\n" not in reason
    assert reason.startswith(f"{schedule.name}: stage ")
    return reason


@given(schedule=schedules(), data=st.data())
def test_a_missing_op_is_refused(schedule, data):
    stage, tick, op = data.draw(st.sampled_from(list(schedule.ops())))
    slot = tuple(other for other in schedule.table[stage][tick] if other != op)
    broken = changed(schedule, {(stage, tick): slot})
    assert refusal(broken) == f"{schedule.name}: stage {stage}: {op} never runs"


@given(schedule=schedules(), data=st.data())
def test_an_op_that_runs_twice_is_refused(schedule, data):
    stage, tick, op = data.draw(st.sampled_from(list(schedule.ops())))
    again = tuple((*row, (op,) if at == stage else ()) for at, row in enumerate(schedule.table))
    assert refusal(replace(schedule, table=again)).endswith(
        f"stage {stage}, tick {schedule.ticks}: {op} runs a second time, after tick {tick}"
    )


@given(schedule=schedules(), data=st.data())
def test_swapped_ops_are_refused(schedule, data):
    when = {(stage, op): tick for stage, tick, op in schedule.ops()}
    pairs = [
        (stage, tick, when[stage, op._replace(kind=later)], op)
        for (stage, op), tick in when.items()
        for later in {"F": "B", "B": "W", "W": ""}[op.kind]
        if when[stage, op._replace(kind=later)] != tick
    ]
    if not pairs:  # one stage in lockstep
        assert schedule.stages == 1
        return
    stage, first, second, op = data.draw(st.sampled_from(pairs))
    row = schedule.table[stage]
    broken = changed(schedule, {(stage, first): row[second], (stage, second): row[first]})
    assert "needs" in refusal(broken)


@given(schedule=schedules(), data=st.data())
def test_a_stage_that_does_not_wait_for_its_neighbour_is_refused(schedule, data):
    if schedule.stages > 1:
        stage = data.draw(st.integers(1, schedule.stages - 1))
        table = list(schedule.table)
        table[stage] = (*table[stage][1:], ())
        reason = refusal(replace(schedule, table=tuple(table)))
        assert f"which ends with tick {stage - 1}: it can run at tick {stage}" in reason


@given(schedule=schedules(), data=st.data())
def test_two_of_a_kind_in_a_slot_are_refused(schedule, data):
    stage, tick, op = data.draw(st.sampled_from(list(schedule.ops())))
    twice = (*schedule.table[stage][tick], op)
    assert "shares its slot with another" in refusal(changed(schedule, {(stage, tick): twice}))


@given(schedule=schedules(), data=st.data())
def test_an_overwritten_row_is_refused(schedule, data):
    lives = lifetimes(schedule)
    clashes = [
        (early, late)
        for early, (birth, death) in lives.items()
        for late, (other, _) in lives.items()
        if early[:2] == late[:2] and early != late and birth <= other <= death
    ]
    if not clashes:
        assert set(schedule.buffers.values()) <= {0, 1}
        return
    early, late = data.draw(st.sampled_from(clashes))
    # above all rows in use, so that the two meet only each other
    rows = {**schedule.rows, early: 99, late: 99}
    reason = refusal(replace(schedule, rows=rows))
    assert f"{late.buffer} of micro-batch" in reason
    assert "overwrites row 99 at tick" in reason


def test_values_and_rows_must_match():
    schedule = build_schedule("zb_h1", 2, 2)
    value, *_ = schedule.rows
    rest = {other: row for other, row in schedule.rows.items() if other != value}
    assert refusal(replace(schedule, rows=rest)).endswith("waits without a row")
    foreign = value._replace(microbatch=7)
    assert refusal(replace(schedule, rows={**schedule.rows, foreign: 0})).endswith("never waits")


def test_ops_and_rows_of_other_sizes_are_refused():
    schedule = build_schedule("1f1b", 2, 2)
    assert "F1 is beyond microbatches=1, chunks=1" in refusal(replace(schedule, microbatches=1))
    shorter = schedule.table[0], schedule.table[1][:-1]
    assert refusal(replace(schedule, table=shorter)).endswith("has 5 ticks and stage 0 has 6")
