"""The picture of a schedule."""

from __future__ import annotations

from fractions import Fraction

from meshwright.sharding.pipeline.schedules import (
    build_schedule,
)
from meshwright.sharding.pipeline.simulate import Costs, simulate
from meshwright.trainer.inspect.schedule import draw_schedule


def test_the_picture_shows_every_op_at_its_time(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    texts, bars = [], []
    monkeypatch.setattr(
        Axes, "text", lambda axes, x, y, label, **style: texts.append((x, y, label))
    )
    monkeypatch.setattr(Axes, "broken_barh", lambda axes, spans, place, **style: bars.append(spans))
    schedule, costs = build_schedule("1f1b", 2, 2), Costs(B=Fraction(2))
    draw_schedule(schedule, simulate(schedule, costs), costs, tmp_path / "chart")
    assert (tmp_path / "chart").read_bytes().startswith(b"\x89PNG")
    assert len(texts) == 2 * 2 * 3
    assert (0.5, 0, "0") in texts  # F of micro-batch 0 on stage 0
    assert (2.0, 1, "0") not in texts
    assert (3.0, 1, "0") in texts  # its B on stage 1, from 2 to 4
    assert len(bars) == len(texts) + 2 * 2 * 2  # and a frame for each slot
