"""Tables as lines of text, laid out by rich; a file of them is not cut at a terminal's width."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import zip_longest

from rich.console import Console
from rich.table import Table
from rich.text import Text


def in_columns(rows: Sequence[Sequence[str]], figures: int = 0) -> list[str]:
    """Each row as a line: its name, `figures` columns of numbers aligned on the right, and what may
    stand behind them.
    """
    table = Table.grid(padding=(0, 2))
    for column in range(max(map(len, rows))):
        table.add_column(justify="right" if 1 <= column <= figures else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    width = sum(max(map(len, row)) + 2 for row in zip_longest(*rows, fillvalue=""))
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]
