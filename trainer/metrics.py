"""What a run leaves to read: metrics.jsonl with full float precision, and the loss picture."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO


def write_line(file: TextIO, values: dict[str, Any]) -> None:
    """One JSON object on one line, on disk before the next step's is due. Not-a-number becomes
    null, as JSON asks.
    """
    values = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()
    }
    file.write(json.dumps(values, allow_nan=False) + "\n")
    file.flush()


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def plot_loss(
    history: Iterable[dict[str, Any]], levels: dict[str, float], path: Path | None = None
):
    """Training and held-out loss over updates, with named horizontal levels; saved where a path is
    given.

    history: the objects of metrics.jsonl. Returns the matplotlib figure.
    """
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    pyplot.close(figure)  # a notebook shows what is returned; it need not show it twice
    axes.set(xlabel="updates", ylabel="loss, nats per token")
    history = list(history)
    for key, label, style in (("loss", "training batch", "-"), ("eval_loss", "held out", "o")):
        points = [(line["step"], line[key]) for line in history if line.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1)
    for i, (name, level) in enumerate(levels.items()):
        axes.axhline(level, linestyle="--", linewidth=1, color=f"C{i + 2}", label=name)
    axes.legend()
    axes.grid(alpha=0.3)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure
