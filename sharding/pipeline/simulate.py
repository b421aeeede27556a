"""What a schedule costs: time, idle time and memory, beside what its paper says.

Two clocks. Stages that wait only for what they need: `makespan`, `span`, `bubble`, what papers
count. And ticks that end together on all stages, each as long as its longest slot: `tick_makespan`,
what a program costs whose every tick ends in an exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from .schedules import Result, Schedule, Slot, needs


class Costs(NamedTuple):
    """Time of one stage, all its chunks, and one micro-batch; of a transfer between two stages.
    Any unit; exact, so that a simulated figure equals a formula's or does not.
    """

    F: Fraction = Fraction(1)
    B: Fraction = Fraction(1)
    W: Fraction = Fraction(1)
    transfer: Fraction = Fraction(0)


def read_costs(text: str) -> Costs:
    """From `F,B,W` or `F,B,W,transfer`. Raises ValueError."""
    try:
        costs = Costs(*map(Fraction, text.split(",")))
    except (TypeError, ValueError, ZeroDivisionError):
        costs = None
    if costs is None or text.count(",") < 2 or costs.F <= 0 or min(costs) < 0:
        raise ValueError(
            f"costs {text!r}: write F,B,W or F,B,W,transfer, as in 1,1,1 or 2,2.5,1,0.1: "
            "none negative, F above 0"
        )
    return costs


@dataclass(frozen=True)
class Run:
    """A slot in time."""

    stage: int
    slot: Slot
    start: Fraction
    end: Fraction


@dataclass(frozen=True)
class Simulation:
    runs: tuple[Run, ...]
    """in the order of ticks"""
    span: tuple[Fraction, ...]
    """of each stage, from its first op to its last"""
    busy: Fraction
    """what each stage computes: m·(F+B+W)"""
    tick_makespan: Fraction
    peak_live: tuple[Fraction, ...]
    """of each stage: micro-batches between F and the end of W, in stages' worth of activations"""

    @property
    def makespan(self) -> Fraction:
        return max(run.end for run in self.runs)

    @property
    def bubble(self) -> Fraction:
        """Idle time of a stage until the last one is done."""
        return self.makespan - self.busy

    @property
    def span_bubble(self) -> Fraction:
        """Idle time of the worst stage between its own first and last op: a zero-bubble paper's
        bubble, as the stages of its steps begin and end one after the other.
        """
        return max(self.span) - self.busy


class Published(NamedTuple):
    """What the paper states, None where these sizes and costs are not what it states it for."""

    bubble: Fraction | None
    peak: Fraction | None
    """of the stage that holds most"""
    of_span: bool
    """whether the bubble is within a stage's span"""


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Run every slot as soon as its stage is free and its inputs are there. Of a checked table."""
    p, v = schedule.stages, schedule.chunks
    made: dict[Result, tuple[int, Fraction]] = {}
    runs: list[Run] = []
    first: dict[int, Fraction] = {}
    free, live, peak = [Fraction(0)] * p, [0] * p, [0] * p
    ticks = Fraction(0)
    for tick in range(schedule.ticks):
        longest = Fraction(0)
        for stage in range(p):
            slot = schedule.table[stage][tick]
            if not slot:
                continue
            results = [schedule.result(stage, op) for op in slot]
            start = free[stage]
            for need in (need for result in results for need in needs(result, p * v)):
                if need not in results:
                    at, end = made[need]
                    start = max(start, end + (costs.transfer if at != stage else 0))
            length = sum((duration(op.kind, schedule, costs) for op in slot), Fraction(0))
            free[stage] = start + length
            made |= {result: (stage, free[stage]) for result in results}
            runs.append(Run(stage, slot, start, free[stage]))
            first.setdefault(stage, start)
            kinds = [op.kind for op in slot]
            live[stage] += kinds.count("F")
            peak[stage] = max(peak[stage], live[stage])
            live[stage] -= kinds.count("W")
            longest = max(longest, length)
        ticks += longest + costs.transfer
    return Simulation(
        runs=tuple(runs),
        span=tuple(free[stage] - first[stage] for stage in range(p)),
        busy=schedule.microbatches * (costs.F + costs.B + costs.W),
        tick_makespan=ticks,
        peak_live=tuple(Fraction(count, v) for count in peak),
    )


def duration(kind: str, schedule: Schedule, costs: Costs) -> Fraction:
    """Of one op, which computes one chunk."""
    return getattr(costs, kind) / schedule.chunks


def published(schedule: Schedule, costs: Costs) -> Published:
    """Bubble and peak as the papers give them, where sizes and costs are such that they are exact.

    DualPipeV's figures count its 2p chunks as stages: (p'/2-1)(F&B + B - 3W) and p'+1 with p' = 2p,
    F&B = F+B+W, and costs and activations of half a stage of ours; its B holds W.
    """
    (F, B, W, transfer), p, m, v = costs, schedule.stages, schedule.microbatches, schedule.chunks
    whole = (p - 1) * (F + B + W)
    match schedule.name:  # the bubble, these costs; the peak, enough micro-batches to reach it
        case "gpipe":
            bubble, fits, peak, full = whole, True, m, True
        case "1f1b" if schedule.uniform:
            bubble, fits, peak, full = whole, True, 2 * p - 1, m >= 2 * p - 1
        case "1f1b":
            bubble, fits, peak, full = whole, True, p, m >= p
        case "interleaved":
            peak = p + Fraction(p - 1, v)
            bubble, fits, full = whole / v, True, m >= peak
        case "zb_h1":
            peak, full = p, m >= p
            bubble, fits = (p - 1) * (F + B - W), full and min(F, B) >= W
        case "zb_h2":
            peak, full = 2 * p - 1, m >= 2 * p - 1
            bubble = (p - 1) * (F + B - 2 * W)
            fits = full and max(0, B - F) <= F + B - 2 * W
        case "zb_v":
            peak, full = p, m >= 2 * p - 1
            bubble, fits = 0, full and F == B == W
        case "dualpipe_v":
            peak, full = p + Fraction(1, 2), True
            bubble, fits = (p - 1) * (F + 2 * B - W) / 2, F == B >= W
        case _:
            bubble, fits, peak, full = 0, False, 0, False
    return Published(
        bubble=Fraction(bubble) if fits and transfer == 0 else None,
        peak=Fraction(peak) if full else None,
        of_span=schedule.name in ("zb_h2", "zb_v"),
    )
