"""What a person sees while a run goes: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..runtime.stop import Stopped


class Reporter:
    """Takes each step's metrics; shows them as the console allows."""

    def __init__(self, console: Console, every: int, progress: Progress):
        self.console = console
        self.every = every
        self.progress = progress
        self.task = progress.tasks[0].id

    def say(self, line: str) -> None:
        with suppress(OSError):  # a run does not depend on who reads its lines
            self.console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def begin(self, done: int) -> None:
        """Start the bar, `done` updates full."""
        self.progress.reset(self.task, completed=done)

    def step(self, metrics: dict[str, Any]) -> None:
        loss, rate = f"loss {metrics['loss']:.4f}", f"{metrics['tokens_per_second']:,.0f} tokens/s"
        self.progress.update(self.task, completed=metrics["step"], loss=loss, rate=rate)
        if not self.console.is_terminal and metrics["step"] % self.every == 0:
            norm = f"lr {metrics['lr']:.3g}  norm {metrics['grad_norm']:.3g}"
            self.say(f"step {metrics['step']}  {loss}  {rate}  {norm}")


def is_terminal() -> bool:
    """Whether stdout is a terminal that can move its cursor."""
    isatty = getattr(sys.stdout, "isatty", bool)  # there may be no stdout
    return isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


@contextmanager
def decoration(what: str, say: Callable[[str], None], *, but: type[Exception] = Stopped):
    """Whatever fails in the body becomes a line that is said, for a run does not depend on it;
    Stopped, and errors like `but`, pass.
    """
    try:
        yield
    except (Stopped, but):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or "no reason given"
        say(f"{'note':<12}no {what}: {type(error).__name__}: {reason}")


@contextmanager
def report_steps(steps: int, every: int, *, quiet: bool = False) -> Iterator[Reporter]:
    """A bar of `steps` updates while open; on no terminal a line every `every` updates instead;
    nothing where `quiet`.
    """
    terminal = is_terminal()
    # not by FORCE_COLOR and its like: a file of lines is to hold lines
    console = Console(quiet=quiet, force_terminal=terminal, force_interactive=terminal)
    progress = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}  {task.fields[rate]}"),
        TimeRemainingColumn(),
        console=console,
        disable=quiet or not console.is_terminal,
    )
    progress.add_task("training", total=steps, loss="", rate="")
    with progress:
        yield Reporter(console, every, progress)
