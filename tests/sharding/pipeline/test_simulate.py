"""Simulated bubbles and peaks are the papers', and those in docs/pipeline.md."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given

from meshwright.sharding.pipeline.schedules import (
    NAMES,
    UNIFORM,
    build_schedule,
)
from meshwright.sharding.pipeline.simulate import Costs, published, read_costs, simulate
from pipelines import SIZES, costs, schedules

# spec/parallelism.md §8: bubble, peak of the worst stage, micro-batches that fill the pipe, and
# costs (F, B, W) for which the bubble is exact. DualPipeV: our p stages hold 2p of the paper's.
FORMULAS = {
    "gpipe": (
        lambda p, v, F, B, W: (p - 1) * (F + B + W),
        lambda p, m, v: m,
        lambda p, v: 1,
        [(1, 1, 1), (2, 3, 1), (1, 2, 2)],
    ),
    "1f1b": (
        lambda p, v, F, B, W: (p - 1) * (F + B + W),
        lambda p, m, v: p,
        lambda p, v: p,
        [(1, 1, 1), (2, 3, 1), (1, 2, 2)],
    ),
    "interleaved": (
        lambda p, v, F, B, W: Fraction(p - 1, v) * (F + B + W),
        lambda p, m, v: p + Fraction(p - 1, v),
        lambda p, v: 2 * p if v == 1 else p + 1,
        [(1, 1, 1), (2, 3, 1), (1, 2, 2)],
    ),
    "zb_h1": (
        lambda p, v, F, B, W: (p - 1) * (F + B - W),
        lambda p, m, v: p,
        lambda p, v: p,
        [(1, 1, 1), (2, 3, 1), (3, 2, 2)],
    ),
    "zb_h2": (
        lambda p, v, F, B, W: (p - 1) * (F + B - 2 * W),
        lambda p, m, v: 2 * p - 1,
        lambda p, v: 2 * p - 1,
        [(1, 1, 1), (2, 3, 1), (3, 2, 2)],
    ),
    "zb_v": (
        lambda p, v, F, B, W: 0,
        lambda p, m, v: p,
        lambda p, v: 2 * p - 1,
        [(1, 1, 1), (3, 3, 3)],
    ),
    "dualpipe_v": (
        lambda p, v, F, B, W: Fraction(p - 1, 2) * ((F + B + W) + (B + W) - 3 * W),
        lambda p, m, v: Fraction(2 * p + 1, 2),
        lambda p, v: 2 * p,
        [(1, 1, 1), (3, 3, 2), (2, 2, 1)],
    ),
}


def of_chunks(name: str) -> tuple[int | None, ...]:
    return (1, 2, 4) if name == "interleaved" else (None,)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_simulated_bubble_and_peak_are_the_papers(name, p, m):
    bubble, peak, fills, exact_for = FORMULAS[name]
    for v in of_chunks(name):
        if name == "dualpipe_v" and m < 2 * p:
            with pytest.raises(ValueError, match="dualpipe_v needs"):
                build_schedule(name, p, m)
            continue
        schedule = build_schedule(name, p, m, v)
        chunks = schedule.chunks
        for F, B, W in exact_for:
            costs = Costs(*map(Fraction, (F, B, W)))
            run, paper = simulate(schedule, costs), published(schedule, costs)
            assert run.busy == m * (F + B + W)
            full = m >= fills(p, chunks)
            if full:
                assert max(run.peak_live) == paper.peak == peak(p, m, chunks)
            else:
                assert paper.peak is None
                assert max(run.peak_live) <= m
            if not full and name in ("zb_h1", "zb_h2", "zb_v"):
                assert paper.bubble is None
                continue
            measured = run.span_bubble if name in ("zb_h2", "zb_v") else run.bubble
            assert measured == paper.bubble == bubble(p, chunks, F, B, W)


@given(schedule=schedules(), costs=costs)
def test_what_is_published_as_exact_is_exact(schedule, costs):
    run, paper = simulate(schedule, costs), published(schedule, costs)
    if paper.bubble is not None:
        assert paper.bubble == (run.span_bubble if paper.of_span else run.bubble)
    if paper.peak is not None:
        assert paper.peak == max(run.peak_live)
    assert run.busy <= min(run.span)
    assert max(run.span) <= run.makespan <= run.tick_makespan
    assert published(schedule, costs._replace(transfer=Fraction(1))).bubble is None


@pytest.mark.parametrize("p", [2, 4, 8])
def test_what_each_stage_holds(p):
    def held(name, uniform=False):
        schedule = build_schedule(name, p, 4 * p, uniform=uniform)
        return list(simulate(schedule, Costs()).peak_live)

    assert held("1f1b") == [p - r for r in range(p)]
    assert held("1f1b", uniform=True) == [2 * (p - 1 - r) + 1 for r in range(p)]
    assert held("gpipe") == [4 * p] * p
    assert held("zb_h1") == held("zb_v") == [p] * p
    assert held("zb_h2") == [2 * p - 1] * p
    assert held("dualpipe_v") == [p + Fraction(1, 2)] * p


@given(schedule=schedules(), costs=costs)
def test_a_uniform_step_costs_its_formula_even_in_ticks(schedule, costs):
    """Where every tick ends in an exchange, the lockstep form still reaches the paper's bubble."""
    costs = costs._replace(transfer=Fraction(0))
    if schedule.uniform:
        run = simulate(schedule, costs)
        bubble = Fraction(schedule.stages - 1, schedule.chunks) * sum(costs)
        assert run.tick_makespan - run.busy == bubble


def test_transfers_delay_only_what_crosses_stages():
    costs = Costs(transfer=Fraction(1, 4))
    # down, turned round without a transfer, and up
    assert simulate(build_schedule("1f1b", 3, 1), costs).makespan == 9 + 4 * Fraction(1, 4)
    assert simulate(build_schedule("gpipe", 1, 4), costs).makespan == 12
    # a V: four half stages down, four up, and a W on each stage; its turn crosses nothing
    assert simulate(build_schedule("zb_v", 2, 1), costs).makespan == (4 + 4 + 2) / 2 + 4 / 4


@pytest.mark.parametrize(
    "text",
    ["", "1", "1,2", "1,2,3,4,5", "1,x,1", "1,-1,1", "0,1,1", "1,nan,1", "1,inf,1", "1,1/0,1"],
)
def test_wrong_costs_are_refused(text):
    with pytest.raises(ValueError, match="write F,B,W or F,B,W,transfer"):
        read_costs(text)


def test_costs_are_exact():
    assert read_costs("1, 2.5,1/3,0.1") == (1, Fraction(5, 2), Fraction(1, 3), Fraction(1, 10))
    assert read_costs("1,1,0") == Costs(W=Fraction(0))


def documented(name: str, p: int, m: int, v: int | None, uniform: bool) -> str:
    """The row of a schedule in docs/pipeline.md's table."""
    schedule = build_schedule(name, p, m, v, uniform)
    run, slow = (simulate(schedule, Costs(B=Fraction(B))) for B in (1, 2))
    cells = [
        f"`{name}`{f', {v} chunks' if v else ''}{', uniform' if uniform else ''}",
        f"{schedule.ticks}",
        *(f"{float(part):g}" for part in (run.bubble, run.span_bubble)),
        f"{float(run.tick_makespan - run.busy):g}",
        *(f"{float(part):g}" for part in (slow.bubble, slow.tick_makespan - slow.busy)),
        " ".join(f"{float(peak):g}" for peak in run.peak_live),
        " ".join(str(rows) for rows in schedule.buffers.values()),
    ]
    return f"| {' | '.join(cells)} |"


def test_the_documents_table_is_what_is_simulated():
    text = (Path(__file__).parents[3] / "docs" / "pipeline.md").read_text(encoding="utf-8")
    rows = [
        documented(name, 4, 8, 2 if name == "interleaved" else None, uniform)
        for name in NAMES
        for uniform in ([False, True] if name in UNIFORM and name != "gpipe" else [False])
    ]
    for row in rows:
        assert row in text.splitlines(), f"docs/pipeline.md lacks\n{row}"
