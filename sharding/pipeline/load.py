"""A schedule by its published name, or a table of one's own from a CSV file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from ..keys import LocalPath, check_local, user_path
from .check import check_ops, check_rows, check_schedule
from .schedules import (
    NAMES,
    PLACEMENTS,
    UNIFORM,
    Placement,
    Schedule,
    Slot,
    build_schedule,
    finish,
    read_slot,
)


def load_schedule(
    name: str,
    stages: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    uniform: bool = False,
) -> Schedule:
    """The published schedule of that name, or the table in that CSV file, whose sizes are its own:
    here they may be left out. Either is checked. Raises ValueError.
    """
    check_local(name)
    if name not in NAMES and _path(name).is_file():
        schedule = read_schedule(read_table(name), name)
        if uniform:
            raise ValueError(
                f"{name} is a table of your own; only {', '.join(UNIFORM)} have a uniform form"
            )
        for what, given in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
            if given not in (None, own := getattr(schedule, what)):
                raise ValueError(f"{what}={given}, but {name} has {own}: write {what}={own}")
        return schedule
    if name not in NAMES:
        raise ValueError(
            f"no schedule and no CSV file is named {name}; the schedules are {', '.join(NAMES)}"
        )
    if stages is None or microbatches is None:
        raise ValueError(f"{name} needs its stages and its microbatches, as in 4 and 8")
    schedule = build_schedule(name, stages, microbatches, chunks, uniform)
    check_schedule(schedule)
    return schedule


def read_table(file: str) -> str:
    """The text of a CSV file; of one line, too, it ends as a line does. Raises ValueError."""
    try:
        text = _path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ValueError(f"{file}: {reason}; write a CSV file") from None
    return "\n".join((*text.splitlines(), ""))


def _read_key(written: str) -> str:
    if "\n" in written:  # it is the text already
        return written
    try:
        return read_table(written)
    except ValueError as error:
        raise ValueError(f"layout.schedule_file={error}") from None


TableFile = Annotated[LocalPath, AfterValidator(_read_key)]
"""What a config key that names such a file is declared as: its value is the file's text."""


def _path(file: str) -> Path:
    return user_path(file)


def read_schedule(text: str, origin: str) -> Schedule:
    """A table from the text of a CSV file, checked: a line for each stage, a cell for each tick
    (`read_slot` has the notation; an empty one is idle). Chunks need a first line `placement,v`, or
    another of PLACEMENTS. Micro-batches and chunks are as many as the cells name. Raises ValueError
    naming `origin`.
    """
    lines = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    while lines and not any(lines[-1]):
        lines.pop()
    placement: Placement | None = None
    if lines and lines[0][0] == "placement":
        written = ", ".join(filter(None, lines.pop(0)[1:]))
        placement = next((known for known in PLACEMENTS if known == written), None)
        if placement is None:
            choices = ", ".join(PLACEMENTS)
            raise ValueError(f"{origin}: placement {written!r}: write one of {choices}")
    if not lines:
        raise ValueError(
            f"{origin} has no stages; write a line for each, with a cell for each tick"
        )
    table: list[list[Slot]] = []
    width = max(map(len, lines))
    for stage, cells in enumerate(lines):
        table.append([])
        for tick, cell in enumerate(cells + [""] * (width - len(cells))):
            try:
                table[-1].append(read_slot(cell))
            except ValueError as error:
                raise ValueError(f"{origin}: stage {stage}, tick {tick}: {error}") from None
    ops = [op for row in table for slot in row for op in slot]
    microbatches = max((op.microbatch for op in ops), default=0) + 1
    chunks = max((op.chunk for op in ops), default=0) + 1
    if chunks > 1 and placement is None:
        raise ValueError(
            f"{origin} has {chunks} chunks on a stage: say where they lie in a first line, "
            f"placement,v (or {', '.join(name for name in PLACEMENTS if name != 'v')})"
        )
    sizes = origin, microbatches, chunks, placement or "contiguous"
    check_ops(Schedule(*sizes, table=tuple(map(tuple, table)), rows={}))
    schedule = finish(*sizes, table)
    check_rows(schedule)
    return schedule
