"""A schedule for people and programs: its table as text, its figures, its Gantt chart."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from ...sharding.pipeline.schedules import Schedule, write_slot
from ...sharding.pipeline.simulate import Costs, Simulation, duration, published
from ..log.pictures import empty_figure

WIDTH = 100
"""Columns of text."""

COLOURS = {"F": "#7aa6d8", "B": "#e8a25c", "W": "#8cbf7f"}


def schedule_json(schedule: Schedule, simulation: Simulation, costs: Costs) -> dict[str, Any]:
    """The figures as plain numbers: of `Simulation` and `Published`. Time is in the costs' unit;
    `formula` holds null where its paper's figure is not exact, and is null for a table of one's
    own; its bubble is `of` the makespan or of the longest span.
    """
    paper = published(schedule, costs)
    formula = {
        "bubble": _number(paper.bubble),
        "of": "span" if paper.of_span else "makespan",
        "peak": _number(paper.peak),
    }
    return {
        "schedule": schedule.name,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "chunks": schedule.chunks,
        "ticks": schedule.ticks,
        "makespan": _number(simulation.makespan),
        "bubble": _number(simulation.bubble),
        "span": [_number(span) for span in simulation.span],
        "tick_makespan": _number(simulation.tick_makespan),
        "peak_live": [_number(peak) for peak in simulation.peak_live],
        "buffers": schedule.buffers,
        "formula": None if paper.bubble is None and paper.peak is None else formula,
    }


def describe_schedule(schedule: Schedule, simulation: Simulation, costs: Costs) -> list[str]:
    """The table, wrapped to WIDTH, and the figures under it."""
    paper = published(schedule, costs)
    stated = [
        f"{what} {_text(value)}"
        for what, value in (
            ("bubble of a span" if paper.of_span else "bubble", paper.bubble),
            ("peak", paper.peak),
        )
        if value is not None
    ]
    return [
        title(schedule),
        *_chart(schedule),
        f"costs       {_pairs(costs._asdict())}",
        f"makespan    {_time(simulation.makespan, simulation.busy)}",
        f"in ticks    {_time(simulation.tick_makespan, simulation.busy)}, "
        "if all stages end each tick together",
        f"spans       {_text(*simulation.span)}, bubble {_text(simulation.span_bubble)} in the "
        "longest",
        f"peak live   {_text(*simulation.peak_live)} stages' activations",
        f"buffers     {_pairs(schedule.buffers)}",
        f"published   {', '.join(stated) or 'nothing exact for these sizes and costs'}",
    ]


def title(schedule: Schedule) -> str:
    """Its name and its sizes."""
    name = f"{schedule.name}, uniform" if schedule.uniform else schedule.name
    chunks = f" of {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    return (
        f"{name}: {schedule.stages} stages{chunks}, {schedule.microbatches} micro-batches, "
        f"{schedule.ticks} ticks"
    )


def draw_schedule(schedule: Schedule, simulation: Simulation, costs: Costs, path: Path) -> None:
    """The Gantt chart in simulated time as a PNG: F blue, B orange, W green; numbers are micro-
    batches; chunks after the first are darker; a frame holds what is one slot.
    """
    stages, makespan = schedule.stages, float(simulation.makespan)
    figure = empty_figure(
        figsize=(min(max(6.0, makespan * 0.3), 40.0), min(0.9 + 0.3 * stages, 200.0)),
        layout="constrained",
    )
    from matplotlib.patches import Patch

    axes = figure.add_subplot()
    for run in simulation.runs:
        start = run.start
        for op in run.slot:
            length = duration(op.kind, schedule, costs)
            shade = 1 - 0.35 * op.chunk / schedule.chunks
            left, width = float(start), float(length)
            colour = [shade * int(COLOURS[op.kind][i : i + 2], 16) / 255 for i in (1, 3, 5)]
            axes.broken_barh([(left, width)], (run.stage - 0.45, 0.9), facecolors=[colour])
            axes.text(
                left + width / 2,
                run.stage,
                str(op.microbatch),
                ha="center",
                va="center",
                fontsize=7,
                clip_on=True,
            )
            start += length
        whole = (float(run.start), float(run.end - run.start))
        axes.broken_barh(
            [whole], (run.stage - 0.45, 0.9), facecolors="none", edgecolors="black", linewidth=0.6
        )
    axes.set(xlim=(0, makespan), ylim=(stages - 0.5, -0.5), xlabel="time", ylabel="stage")
    axes.set_yticks(range(stages))
    axes.set_title(title(schedule), fontsize=9, loc="left")
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside right upper", fontsize=8)
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _chart(schedule: Schedule) -> list[str]:
    """A line for each stage, a column for each tick, in blocks no wider than WIDTH."""
    cells = [[write_slot(slot) for slot in row] for row in schedule.table]
    column = 1 + max(len(cell) for row in cells for cell in row)
    labels = [f"stage {stage}  " for stage in range(schedule.stages)]
    margin = max(map(len, labels))
    block = max((WIDTH - margin) // column, 1)
    lines = []
    for first in range(0, schedule.ticks, block):
        if schedule.ticks > block:
            lines.append(f"from tick {first}")
        for label, row in zip(labels, cells, strict=True):
            shown = "".join(f"{cell:{column}}" for cell in row[first : first + block])
            lines.append((label.ljust(margin) + shown).rstrip())
    return lines


def _time(makespan: Fraction, busy: Fraction) -> str:
    bubble = makespan - busy
    share = float(bubble / makespan)
    return f"{_text(makespan)}: {_text(busy)} busy, bubble {_text(bubble)} ({share:.1%})"


def _pairs(values: Mapping[str, Fraction | int]) -> str:
    return ", ".join(f"{key} {_text(value)}" for key, value in values.items())


def _text(*values: Fraction | int) -> str:
    return " ".join(f"{float(value):g}" for value in values)


def _number(value: Fraction | None) -> int | float | None:
    if value is None:
        return None
    return int(value) if value.denominator == 1 else float(value)
