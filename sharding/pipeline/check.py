"""No table runs unchecked: every op once, after what it needs, and no value is overwritten in wait.

All errors are ValueErrors of one line that name the stage, the tick and the op, counted from 0.
"""

from __future__ import annotations

from itertools import product

from .schedules import Op, Result, Schedule, Value, lifetimes, needs


def check_schedule(schedule: Schedule) -> None:
    """Raise ValueError unless a program that follows the table computes every gradient once."""
    check_ops(schedule)
    check_rows(schedule)


def check_ops(schedule: Schedule) -> None:
    """Sizes, slots, each F, B and W exactly once, and each after what it needs: in the same slot,
    or in an earlier tick, so that a result has a tick to reach its neighbour.
    """
    name, p, m, v = schedule.name, schedule.stages, schedule.microbatches, schedule.chunks
    for stage, row in enumerate(schedule.table):
        if len(row) != schedule.ticks:
            raise ValueError(
                f"{name}: stage {stage} has {len(row)} ticks and stage 0 has {schedule.ticks}"
            )
    where: dict[Result, tuple[int, int]] = {}
    for stage, tick, op in schedule.ops():
        here = f"{name}: stage {stage}, tick {tick}: {op}"
        if not (0 <= op.microbatch < m and 0 <= op.chunk < v):
            raise ValueError(f"{here} is beyond microbatches={m}, chunks={v}")
        kinds = [other.kind for other in schedule.table[stage][tick]]
        if kinds != [kind for kind in "FBW" if kind in kinds]:
            raise ValueError(
                f"{here} shares its slot with another: at most one F, one B, one W in this order"
            )
        result = schedule.result(stage, op)
        if result in where:
            raise ValueError(f"{here} runs a second time, after tick {where[result][1]}")
        where[result] = stage, tick
    for microbatch, stage, chunk, kind in product(range(m), range(p), range(v), "FBW"):
        op = Op(kind, microbatch, chunk)
        if schedule.result(stage, op) not in where:
            raise ValueError(f"{name}: stage {stage}: {op} never runs")
    for stage, tick, op in schedule.ops():
        for need in needs(schedule.result(stage, op), p * v):
            at, then = where[need]
            if then >= tick and (at, then) != (stage, tick):
                raise ValueError(
                    f"{name}: stage {stage}, tick {tick}: {op} needs {need.kind} of micro-batch "
                    f"{need.microbatch} from stage {at}, which ends with tick {then}: "
                    f"it can run at tick {then + 1}"
                )


def check_rows(schedule: Schedule) -> None:
    """Each value that waits has a row of its buffer, and no other in it from the phase that writes
    it to the phase that reads it last. Of a table that has passed `check_ops`.
    """
    lives = lifetimes(schedule)
    for value in {*lives, *schedule.rows}:
        if value not in schedule.rows or value not in lives or schedule.rows[value] < 0:
            problem = "waits without a row" if value in lives else "has a row and never waits"
            raise ValueError(f"{schedule.name}: {_describe(value)} {problem}")
    held: dict[tuple[str, int, int], Value] = {}  # (buffer, stage, row) -> the last written
    for value, (birth, _) in sorted(lives.items(), key=lambda item: item[1]):
        place = value.buffer, value.stage, schedule.rows[value]
        before = held.get(place)
        if before is not None and lives[before][1] >= birth:
            raise ValueError(
                f"{schedule.name}: {_describe(value)} overwrites row {place[2]} at tick "
                f"{birth // 5}, where micro-batch {before.microbatch}, chunk {before.chunk} waits "
                f"until tick {lives[before][1] // 5}"
            )
        held[place] = value


def _describe(value: Value) -> str:
    return (
        f"stage {value.stage}: {value.buffer} of micro-batch {value.microbatch}, "
        f"chunk {value.chunk}"
    )
