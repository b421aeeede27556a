"""metrics.jsonl keeps every bit of a float and is strict JSON; the picture shows the history."""

from __future__ import annotations

import io
import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from meshwright.trainer.metrics import plot_loss, read_lines, write_line

VALUES = st.one_of(st.floats(), st.integers(), st.none(), st.text(max_size=5), st.booleans())


def strict(text: str):
    """What a parser reads that knows no NaN."""

    def refuse(word):
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=6))
def test_a_line_is_strict_json_that_gives_every_finite_value_back(values):
    file = io.StringIO()
    write_line(file, values)
    line = file.getvalue()
    assert line.endswith("\n")
    assert line.count("\n") == 1
    expected = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
    assert strict(line) == expected


def test_not_a_number_becomes_null_and_the_rest_stays():
    file = io.StringIO()
    write_line(file, {"loss": math.nan, "grad_norm": math.inf, "lr": -math.inf, "step": 3})
    assert strict(file.getvalue()) == {"loss": None, "grad_norm": None, "lr": None, "step": 3}


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_every_float32_comes_back_bitwise(floats):
    file = io.StringIO()
    for number in floats:
        write_line(file, {"loss": np.float32(number).item()})
    back = [np.float32(json.loads(line)["loss"]) for line in file.getvalue().splitlines()]
    assert np.asarray(back, np.float32).tobytes() == np.asarray(floats, np.float32).tobytes()


def test_read_lines_reads_what_write_line_wrote(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "loss": 1 / 3}, {"step": 1, "eval_loss": 0.1}]
    with path.open("w", encoding="utf-8") as file:
        for i, line in enumerate(lines):
            write_line(file, line)
            assert read_lines(path) == lines[: i + 1]  # on disk at once


def curves(figure: Figure) -> dict[str, tuple[list, list]]:
    (axes,) = figure.axes
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines
    }


def test_the_picture_shows_both_losses_and_the_levels(tmp_path):
    history = [
        {"step": 1, "loss": 3.0},
        {"step": 2, "loss": None},
        {"step": 2, "eval_loss": 2.5},
        {"step": 3, "loss": 2.0},
    ]
    path = tmp_path / "loss.png"
    figure = plot_loss(iter(history), {"unigram counts": 2.2}, path)
    assert curves(figure) == {
        "training batch": ([1, 3], [3.0, 2.0]),
        "held out": ([2], [2.5]),
        "unigram counts": ([0, 1], [2.2, 2.2]),
    }
    assert figure.axes[0].get_xlabel() == "updates"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_history_without_evaluations_or_levels_is_drawn_too():
    assert list(curves(plot_loss([{"step": 1, "loss": 1.0}], {}))) == ["training batch"]
