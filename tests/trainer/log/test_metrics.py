"""metrics.jsonl keeps every bit of a float, is strict JSON, and goes on where a run resumes; the
picture shows the history."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from disk import largest_file
from meshwright.trainer.log.metrics import open_metrics, plot_expert_load, plot_loss

VALUES = st.one_of(st.floats(), st.integers(), st.none(), st.text(max_size=5), st.booleans())


def strict(text: str):
    """What a parser reads that knows no NaN."""

    def refuse(word):
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def opened(path, step=0, position=0, *, writes=True, required=True, said=None):
    say = (lambda line: None) if said is None else said.append
    return open_metrics(path, step, position, writes=writes, required=required, say=say)


def write(path, *lines, step=0):
    with opened(path, step) as metrics:
        for line in lines:
            metrics.write(line)
    return metrics


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_line_is_strict_json_that_gives_every_finite_value_back(path, values):
    path.unlink(missing_ok=True)
    write(path, values)
    line = path.read_text(encoding="utf-8")
    assert line.endswith("\n")
    assert line.count("\n") == 1
    expected = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
    assert strict(line) == expected


def test_not_a_number_becomes_null_and_the_rest_stays(path):
    write(path, {"loss": math.nan, "grad_norm": math.inf, "lr": -math.inf, "step": 3})
    expected = {"loss": None, "grad_norm": None, "lr": None, "step": 3}
    assert strict(path.read_text()) == expected


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_float32_comes_back_bitwise(path, floats):
    path.unlink(missing_ok=True)
    write(path, *({"loss": np.float32(number).item()} for number in floats))
    back = [np.float32(json.loads(line)["loss"]) for line in path.read_text().splitlines()]
    assert np.asarray(back, np.float32).tobytes() == np.asarray(floats, np.float32).tobytes()


def test_a_line_is_on_disk_at_once(path):
    lines = [{"step": 1, "loss": 1 / 3}, {"step": 1, "eval_loss": 0.1}]
    with opened(path) as metrics:
        for i, line in enumerate(lines, 1):
            metrics.write(line)
            assert [json.loads(line) for line in path.read_text().splitlines()] == lines[:i]
    assert metrics.history == lines


LINES = [
    {"step": 1, "loss": 3.0},
    {"step": 2, "loss": 2.0},
    {"step": 2, "eval_loss": 2.5},
    {"step": 3, "loss": 1.0},
]


@pytest.mark.parametrize("torn", ["", '{"step": 4, "lo', "{"])
@pytest.mark.parametrize(("step", "kept"), [(0, 0), (1, 1), (2, 3), (3, 4), (9, 4)])
def test_opened_again_it_is_cut_behind_the_step_and_before_half_a_line(path, step, kept, torn):
    write(path, *LINES)
    with path.open("a") as file:
        file.write(torn)
    metrics = write(path, {"step": step + 1}, step=step)
    expected = [*LINES[:kept], {"step": step + 1}]
    assert metrics.history == expected
    assert [json.loads(line) for line in path.read_text().splitlines()] == expected


def test_opened_again_it_is_cut_behind_the_position_where_attempts_were_skipped(path):
    lines = [{"step": 1, "position": p, "skipped": p - 1} for p in (1, 2, 3)]
    write(path, *lines[:1], {"step": 1, "eval_loss": 2.5}, *lines[1:])
    with opened(path, step=1, position=2) as metrics:
        assert metrics.history == [lines[0], {"step": 1, "eval_loss": 2.5}, lines[1]]


DAMAGE = ['{"step": 2', "[]", '{"loss": 1.0}', "\x00\x00", "[" * 200_000, '{"step": 9' + "9" * 5000]


@pytest.mark.parametrize("damage", DAMAGE, ids=range(len(DAMAGE)))
def test_a_damaged_line_is_named(path, damage):
    path.write_text(f'{{"step": 1}}\n{damage}\n{{"step": 3}}\n')
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not an object with a step"):
        write(path, step=3)
    assert path.read_bytes() == before


def test_a_process_that_does_not_write_keeps_the_history(path):
    with opened(path, writes=False) as metrics:
        metrics.write({"step": 1})
    assert metrics.history == [{"step": 1}]
    assert not path.exists()


def test_a_deleted_file_is_an_error(path):
    with opened(path, required=False) as metrics:
        metrics.write({"step": 1})
        path.unlink()
        with pytest.raises(FileNotFoundError, match=f"deleted: '{path}'"):
            metrics.write({"step": 2})


def test_a_full_disk_is_named(path):
    with (
        opened(path) as metrics,
        largest_file(15),
        pytest.raises(OSError, match=f"File too large: '{path}'"),
    ):
        metrics.write({"step": 1})
        metrics.write({"step": 2})


def test_what_a_full_disk_refused_is_written_later_where_nothing_is_required(path):
    said = []
    with opened(path, required=False, said=said) as metrics:
        with largest_file(15):
            metrics.write({"step": 1})
            metrics.write({"step": 2})
            metrics.write({"step": 3})
            assert path.read_text() == '{"step": 1}\n{"s'
        metrics.write({"step": 4})
    assert path.read_text() == "".join(f'{{"step": {i}}}\n' for i in (1, 2, 3, 4))
    assert said == [f"{path}: File too large; its lines wait for room"]


def test_lines_that_never_find_room_are_an_error_at_the_end(path):
    with (
        largest_file(15),
        pytest.raises(OSError, match=f"File too large: '{path}'"),
        opened(path, required=False) as metrics,
    ):
        metrics.write({"step": 1})
        metrics.write({"step": 2})


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


def test_the_picture_of_experts_has_a_line_for_each_layer(tmp_path):
    history = [
        {"step": 1, "loss": 3.0, "expert_load": [2.0, 4.0]},
        {"step": 1, "eval_loss": 2.5},
        {"step": 2, "loss": 2.0, "expert_load": [1.5, 1.25]},
    ]
    path = tmp_path / "experts.png"
    assert curves(plot_expert_load(iter(history), [1, 2], path)) == {
        "layer 2": ([1, 2], [2.0, 1.5]),
        "layer 3": ([1, 2], [4.0, 1.25]),
        "even": ([0, 1], [1, 1]),
    }
    assert path.read_bytes().startswith(b"\x89PNG")
    deep = plot_expert_load([{"step": 1, "expert_load": [1.0] * 9}], range(9))
    assert [text.get_text() for text in deep.axes[0].get_legend().get_texts()] == [
        *("layer 1", "layer 9", "even")
    ]
    with pytest.raises(ValueError, match="^no expert_load in metrics.jsonl"):
        plot_expert_load(history[1:2], [])
