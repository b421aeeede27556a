"""What a run leaves to read: metrics.jsonl with full float precision, and its pictures."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from .pictures import empty_figure


@contextmanager
def open_metrics(
    path: Path,
    step: int,
    position: int,
    *,
    writes: bool,
    required: bool,
    say: Callable[[str], None],
) -> Iterator[MetricsFile]:
    """metrics.jsonl cut behind update `step` and data position `position`, open for appending.

    writes: false on a process that only keeps the history. required, say: see MetricsFile.write.
    Raises OSError, also at the end where lines are still waiting for room.
    """
    if not writes:
        history = lines_until(path, step, position)[0] if path.exists() else []
        yield MetricsFile(path, history, None, required, say)
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    with open(descriptor, "ab", buffering=0) as file:
        history, size = lines_until(path, step, position)
        file.truncate(size)
        metrics = MetricsFile(path, history, file, required, say)
        yield metrics
        metrics.finish()


class MetricsFile:
    """The objects of metrics.jsonl, of which a run resumes with the first and appends the rest."""

    def __init__(
        self,
        path: Path,
        history: list[dict[str, Any]],
        file: FileIO | None,
        required: bool,
        say: Callable[[str], None],
    ):
        self.path = path
        self.history = history
        self._file = file
        self._required = required
        self._say = say
        self._unwritten = b""

    def write(self, values: dict[str, Any]) -> None:
        """One JSON object on one line, with the system before this returns. Not-a-number becomes
        null, as JSON asks. Where nothing is `required`, lines that the disk refuses wait for the
        next, and `say` is told.

        Raises OSError where the disk refuses, and in any case where the file is no longer there.
        """
        self.history.append(values)
        if self._file is None:
            return
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        waiting = bool(self._unwritten)
        self._unwritten += json.dumps(finite, allow_nan=False).encode() + b"\n"
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the run's file has been deleted", str(self.path))
        try:
            self.finish()
        except OSError as error:
            if self._required:
                raise
            if not waiting:
                self._say(f"{self.path}: {error.strerror}; its lines wait for room")

    def finish(self) -> None:
        """Write what is still waiting. Raises OSError where the disk refuses."""
        try:
            while self._unwritten and self._file is not None:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            error.filename = str(self.path)
            raise

    def sync(self) -> None:
        """Have what is written survive a crash of the machine as well, where the disk can."""
        if self._file is not None:
            with suppress(OSError):  # the next write tells
                os.fsync(self._file.fileno())


def lines_until(
    path: Path, step: int, position: float = math.inf
) -> tuple[list[dict[str, Any]], int]:
    """The objects of the attempts up to update `step` and data position `position`, and the bytes
    they take: a run that was killed may have written further, and half a line. Raises ValueError
    for a line that is no JSON object.
    """
    history, size = [], 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                values = json.loads(line)
                beyond = values["step"] > step or values.get("position", 0) > position
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ValueError(
                    f"{path}, line {number}: not an object with a step; the file is damaged, "
                    f"delete the lines from there on"
                ) from None
            if beyond:
                break
            history.append(values)
            size += len(line)
    return history, size


def plot_loss(
    history: Iterable[dict[str, Any]], levels: dict[str, float], path: Path | None = None
):
    """Training and held-out loss over updates, with named horizontal levels; saved where a path is
    given.

    history: the objects of metrics.jsonl. Returns the matplotlib figure.
    """
    figure, axes = _picture("loss, nats per token")
    history = list(history)
    for key, label, style in (("loss", "training batch", "-"), ("eval_loss", "held out", "o")):
        points = [(line["step"], line[key]) for line in history if line.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1)
    for i, (name, level) in enumerate(levels.items()):
        axes.axhline(level, linestyle="--", linewidth=1, color=f"C{i + 2}", label=name)
    return _finished(figure, path)


def plot_expert_load(
    history: Iterable[dict[str, Any]], numbers: Sequence[int], path: Path | None = None
):
    """The load of each layer's most chosen expert over updates, beside that of all where they are
    chosen evenly; saved where a path is given.

    history: the objects of metrics.jsonl; numbers: of the layers with experts, the first being 0.
    Returns the matplotlib figure. Raises ValueError where no experts were logged.
    """
    lines = [line for line in history if "expert_load" in line]
    if not lines:
        raise ValueError("no expert_load in metrics.jsonl: a run of a model with experts logs it")
    figure, axes = _picture("choices of the most chosen expert / mean")
    from matplotlib import colormaps

    colours = colormaps["viridis"]
    layers = list(zip(*(line["expert_load"] for line in lines), strict=True))
    for layer, loads in enumerate(layers):
        shade = colours(0.9 * layer / max(len(layers) - 1, 1))  # the end of it is pale
        named = len(layers) <= 8 or layer in (0, len(layers) - 1)
        label = f"layer {numbers[layer] + 1}" if named else None
        axes.plot([line["step"] for line in lines], loads, color=shade, label=label, linewidth=1)
    axes.axhline(1, linestyle="--", linewidth=1, color="C0", label="even")
    return _finished(figure, path)


def _picture(quantity: str):
    """An empty figure of a quantity over updates, and its axes."""
    figure = empty_figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel="updates", ylabel=quantity)
    return figure, axes


def _finished(figure: Any, path: Path | None):
    (axes,) = figure.axes
    axes.legend()
    axes.grid(alpha=0.3)
    if path is not None:
        figure.savefig(path, dpi=120)
    elif "IPython" in sys.modules:
        # a notebook shows the figure that a cell returns once its backend is loaded; pyplot does it
        # for its first figure, where it can
        with suppress(Exception):
            from matplotlib import pyplot

            pyplot.close(pyplot.figure())
    return figure
