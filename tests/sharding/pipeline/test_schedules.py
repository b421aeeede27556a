"""Pipeline schedules: the papers' ticks, bubbles, peaks; what the checker accepts and refuses."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.sharding.pipeline.check import check_schedule
from meshwright.sharding.pipeline.load import load_schedule
from meshwright.sharding.pipeline.schedules import (
    NAMES,
    PLACEMENTS,
    UNIFORM,
    Op,
    Schedule,
    build_schedule,
    depth_of,
    finish,
    lifetimes,
    read_slot,
    write_slot,
)
from meshwright.sharding.pipeline.simulate import Costs, published, read_costs, simulate
from meshwright.trainer.inspect.schedule import draw_schedule


@st.composite
def schedules(draw, most_stages: int = 5) -> Schedule:
    """Any builder's table."""
    name = draw(st.sampled_from(NAMES))
    p = draw(st.integers(1, most_stages))
    m = draw(st.integers(1, 2 * p + 2))
    v = None
    if name == "interleaved":
        m, v = p * draw(st.integers(1, 3)), draw(st.integers(1, 4))
    if name == "dualpipe_v":
        m += 2 * p
    uniform = name in UNIFORM and draw(st.booleans())
    return build_schedule(name, p, m, v, uniform)


times = st.fractions(min_value=Fraction(1, 8), max_value=4, max_denominator=8)
costs = st.builds(Costs, times, times, times, st.sampled_from([Fraction(0), Fraction(1, 8)]))

SIZES = [(p, p * times) for p in (2, 4, 8) for times in (1, 2, 4)]

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


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_ticks_are_the_papers(p, m):
    """Every slot one tick. ZB-H1 with four stages and six micro-batches needs 21."""

    def ticks(name, v=None, uniform=False):
        return build_schedule(name, p, m, v, uniform).ticks

    assert ticks("gpipe") == ticks("1f1b") == 2 * (m + p - 1)
    assert ticks("1f1b", uniform=True) == m + 2 * (p - 1)
    assert ticks("zb_h1") == 3 * m + p - 1
    for v in (1, 2, 4):
        assert ticks("interleaved", v) == 2 * (m * v + p - 1)
        assert ticks("interleaved", v, uniform=True) == m * v + p * v + p - 2
    if m >= 2 * p - 1:
        assert ticks("zb_h2") == 3 * m + p - 1
        assert ticks("zb_v") == 6 * m + p - 1
    assert build_schedule("zb_h1", 4, 6).ticks == 21


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


def test_buffers_of_what_is_known():
    assert build_schedule("gpipe", 4, 8).buffers == {"x": 1, "dy": 8, "stash": 8, "taps": 0}
    assert build_schedule("1f1b", 4, 8).buffers["stash"] == 4
    uniform = build_schedule("1f1b", 4, 8, uniform=True)
    assert uniform.buffers == {"x": 1, "dy": 1, "stash": 7, "taps": 0}
    assert build_schedule("1f1b", 4, 64, uniform=True).buffers == uniform.buffers
    # input gradients of the last stage run at once; the weights' wait up to three more
    assert build_schedule("zb_h1", 4, 8).buffers == {"x": 1, "dy": 1, "stash": 4, "taps": 4}


@given(schedule=schedules())
def test_builders_tables_pass(schedule):
    check_schedule(schedule)
    assert sum(len(slot) for row in schedule.table for slot in row) == (
        3 * schedule.stages * schedule.chunks * schedule.microbatches
    )


def execute(schedule: Schedule) -> tuple[dict[tuple[int, int], int], dict[int, int]]:
    """Run a table as a program does, out of nothing but its buffers' rows: y = weight·x + 1 per
    chunk, loss = sum of (micro-batch + 1)·y². Returns the weight gradient of each (stage, chunk)
    and the input gradient of each micro-batch.
    """
    p, v, rows = schedule.stages, schedule.chunks, schedule.rows
    at = {
        depth_of(schedule.placement, p, v, stage, chunk): (stage, chunk)
        for stage in range(p)
        for chunk in range(v)
    }
    memory: dict[tuple[str, int, int], object] = {}  # (buffer, stage, row): one value each
    gradients, inputs = defaultdict(int), {}

    def put(buffer, depth, microbatch, value):
        stage, chunk = at[depth]
        memory[buffer, stage, rows[buffer, stage, microbatch, chunk]] = value

    def get(buffer, depth, microbatch):
        stage, chunk = at[depth]
        return memory[buffer, stage, rows[buffer, stage, microbatch, chunk]]

    for tick in range(schedule.ticks):
        sent = []
        for stage in range(p):
            taps = None  # of a W in the slot of its B
            for op in schedule.table[stage][tick]:
                kind, i, depth = schedule.result(stage, op)
                weight = weight_of(depth)
                if kind == "F":
                    x = get("x", depth, i) if depth else i
                    put("stash", depth, i, x)
                    y = weight * x + 1
                    if depth + 1 < p * v:
                        sent.append(("x", depth + 1, i, y))
                    else:
                        put("dy", depth, i, 2 * (i + 1) * y)
                elif kind == "B":
                    dy = get("dy", depth, i)
                    taps = get("stash", depth, i), dy
                    if ("taps", stage, i, op.chunk) in rows:
                        put("taps", depth, i, taps)
                        taps = None
                    if depth:
                        sent.append(("dy", depth - 1, i, weight * dy))
                    else:
                        inputs[i] = weight * dy
                else:
                    x, dy = taps or get("taps", depth, i)
                    gradients[stage, op.chunk] += x * dy
        for message in sent:
            put(*message)
    return gradients, inputs


def weight_of(depth: int) -> int:
    return 1 + depth % 3


@given(schedule=schedules())
def test_executed_from_its_rows_a_table_gives_the_gradients_of_no_pipeline(schedule):
    p, v, m = schedule.stages, schedule.chunks, schedule.microbatches
    expected, inputs = [0] * (p * v), {}
    for i in range(m):
        xs = [i]
        for depth in range(p * v):
            xs.append(weight_of(depth) * xs[-1] + 1)
        dy = 2 * (i + 1) * xs.pop()
        for depth in reversed(range(p * v)):
            expected[depth] += xs[depth] * dy
            dy *= weight_of(depth)
        inputs[i] = dy
    gradients, computed = execute(schedule)
    assert computed == inputs
    for (stage, chunk), gradient in gradients.items():
        assert gradient == expected[depth_of(schedule.placement, p, v, stage, chunk)]
    assert len(gradients) == p * v


def changed(schedule: Schedule, cells: dict[tuple[int, int], tuple[Op, ...]]) -> Schedule:
    table = [list(row) for row in schedule.table]
    for (stage, tick), slot in cells.items():
        table[stage][tick] = slot
    return replace(schedule, table=tuple(map(tuple, table)))


def refusal(schedule: Schedule) -> str:
    with pytest.raises(ValueError) as caught:
        check_schedule(schedule)
    reason = str(caught.value)
    assert "\n" not in reason
    assert reason.startswith(f"{schedule.name}: stage ")
    return reason


@given(schedule=schedules(), data=st.data())
def test_a_missing_op_is_refused(schedule, data):
    stage, tick, op = data.draw(st.sampled_from(list(schedule.ops())))
    slot = tuple(other for other in schedule.table[stage][tick] if other != op)
    broken = changed(schedule, {(stage, tick): slot})
    assert refusal(broken) == f"{schedule.name}: stage {stage}: {op} never runs"


@given(schedule=schedules(), data=st.data())
def test_an_op_that_runs_twice_is_refused(schedule, data):
    stage, tick, op = data.draw(st.sampled_from(list(schedule.ops())))
    again = tuple((*row, (op,) if at == stage else ()) for at, row in enumerate(schedule.table))
    assert refusal(replace(schedule, table=again)).endswith(
        f"stage {stage}, tick {schedule.ticks}: {op} runs a second time, after tick {tick}"
    )


@given(schedule=schedules(), data=st.data())
def test_swapped_ops_are_refused(schedule, data):
    when = {(stage, op): tick for stage, tick, op in schedule.ops()}
    pairs = [
        (stage, tick, when[stage, op._replace(kind=later)], op)
        for (stage, op), tick in when.items()
        for later in {"F": "B", "B": "W", "W": ""}[op.kind]
        if when[stage, op._replace(kind=later)] != tick
    ]
    if not pairs:  # one stage in lockstep
        assert schedule.stages == 1
        return
    stage, first, second, op = data.draw(st.sampled_from(pairs))
    row = schedule.table[stage]
    broken = changed(schedule, {(stage, first): row[second], (stage, second): row[first]})
    assert "needs" in refusal(broken)


@given(schedule=schedules(), data=st.data())
def test_a_stage_that_does_not_wait_for_its_neighbour_is_refused(schedule, data):
    if schedule.stages > 1:
        stage = data.draw(st.integers(1, schedule.stages - 1))
        table = list(schedule.table)
        table[stage] = (*table[stage][1:], ())
        reason = refusal(replace(schedule, table=tuple(table)))
        assert f"which ends with tick {stage - 1}: it can run at tick {stage}" in reason


@given(schedule=schedules(), data=st.data())
def test_two_of_a_kind_in_a_slot_are_refused(schedule, data):
    stage, tick, op = data.draw(st.sampled_from(list(schedule.ops())))
    twice = (*schedule.table[stage][tick], op)
    assert "shares its slot with another" in refusal(changed(schedule, {(stage, tick): twice}))


@given(schedule=schedules(), data=st.data())
def test_an_overwritten_row_is_refused(schedule, data):
    lives = lifetimes(schedule)
    clashes = [
        (early, late)
        for early, (birth, death) in lives.items()
        for late, (other, _) in lives.items()
        if early[:2] == late[:2] and early != late and birth <= other <= death
    ]
    if not clashes:
        assert set(schedule.buffers.values()) <= {0, 1}
        return
    early, late = data.draw(st.sampled_from(clashes))
    # above all rows in use, so that the two meet only each other
    rows = {**schedule.rows, early: 99, late: 99}
    reason = refusal(replace(schedule, rows=rows))
    assert f"{late.buffer} of micro-batch" in reason
    assert "overwrites row 99 at tick" in reason


def test_values_and_rows_must_match():
    schedule = build_schedule("zb_h1", 2, 2)
    value, *_ = schedule.rows
    rest = {other: row for other, row in schedule.rows.items() if other != value}
    assert refusal(replace(schedule, rows=rest)).endswith("waits without a row")
    foreign = value._replace(microbatch=7)
    assert refusal(replace(schedule, rows={**schedule.rows, foreign: 0})).endswith("never waits")


def test_ops_and_rows_of_other_sizes_are_refused():
    schedule = build_schedule("1f1b", 2, 2)
    assert "F1 is beyond microbatches=1, chunks=1" in refusal(replace(schedule, microbatches=1))
    shorter = schedule.table[0], schedule.table[1][:-1]
    assert refusal(replace(schedule, table=shorter)).endswith("has 5 ticks and stage 0 has 6")


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("p", "v"), [(1, 1), (4, 1), (4, 2), (3, 3)])
def test_a_placement_gives_every_depth_one_place(placement, p, v):
    places = [(stage, chunk) for stage in range(p) for chunk in range(v)]
    depths = [depth_of(placement, p, v, *place) for place in places]
    assert sorted(depths) == list(range(p * v))
    assert v > 1 or depths == list(range(p))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("zb_h3", 4, 8), "no schedule and no CSV file is named zb_h3; the schedules are gpipe, "),
        (("1f1b", None, 8), "1f1b needs its stages and its microbatches, as in 4 and 8"),
        (("1f1b", 0, 8), "stages=0: write at least 1"),
        (("1f1b", 4, -1), "microbatches=-1: write at least 1"),
        (("interleaved", 4, 8, 0), "chunks=0: write at least 1"),
        (("interleaved", 4, 8), "interleaved needs chunks, the pieces each stage is cut into"),
        (("interleaved", 4, 6, 2), "microbatches=6 is not a multiple of stages=4, .* write "
         "microbatches=8"),
        (("1f1b", 4, 8, 2), "chunks=2: 1f1b has 1 on each stage; write chunks=1"),
        (("zb_v", 4, 8, 1), "chunks=1: zb_v has 2 on each stage; write chunks=2"),
        (("dualpipe_v", 4, 7), "microbatches=7 is less than twice stages=4, .* microbatches=8"),
        (("zb_v", 4, 8, None, True), "zb_v has no uniform form; gpipe, 1f1b, interleaved have one"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_exist_are_refused(words, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        load_schedule(*words)
    assert "\n" not in str(caught.value)


def write(schedule: Schedule, path) -> str:
    lines = [",".join(map(write_slot, row)) for row in schedule.table]
    first = [f"placement,{schedule.placement}"] if schedule.chunks > 1 else []
    path.write_text("\n".join([*first, *lines]) + "\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("uniform", [False, True])
def test_a_table_survives_its_file(name, uniform, tmp_path):
    if uniform and name not in UNIFORM:
        return
    schedule = build_schedule(name, 3, 6, 3 if name == "interleaved" else None, uniform)
    path = write(schedule, tmp_path / "table.csv")
    assert load_schedule(path) == replace(schedule, name=path, uniform=False)


def test_spreadsheets_files_are_read(tmp_path):
    """With a byte order mark, CRLF, blanks, short and empty lines."""
    path = tmp_path / "table.csv"
    path.write_bytes(b"\xef\xbb\xbfF0, ,,BW0\r\n,F0 ,BW0\r\n,,,\r\n")
    schedule = load_schedule(str(path), 2, 1, 1)
    assert schedule.table == build_schedule("gpipe", 2, 1).table
    assert simulate(schedule, Costs()).makespan == 6
    assert published(schedule, Costs()) == (None, None, False)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no stages; write a line for each"),
        ("placement,v\n", "has no stages; write a line for each"),
        (",,\n", "has no stages"),
        ("F0,G0\n", "stage 0, tick 1: 'G0' is no slot; write F3, B3, W3 or BW3, "),
        ("F0 B0\n", "'F0 B0' is no slot"),
        ("F0;B0;W0\n", "'F0;B0;W0' is no slot"),
        ("F0,F-1\n", "'F-1' is no slot"),
        ("F0,B0+F1,W0\n", "'B0.F1': a slot runs at most one F, one B and one W, in this order"),
        ("F0+F1,BW0,BW1\n", "'F0.F1': a slot runs at most one F"),
        ("F0,B0\n", "stage 0: W0 never runs"),
        ("F0,BW0,F999999\n", "stage 0: F1 never runs"),
        ("F0,,BW0\n,BW0,F0\n", "stage 1, tick 1: B0 needs F of micro-batch 0 from stage 1"),
        ("F0,,BW0\n,F0,BW0\n", "stage 0, tick 2: B0 needs B of micro-batch 0 from stage 1, which "
         "ends with tick 2: it can run at tick 3"),
        ("F0,F0.1,BW0.1,BW0\n", "has 2 chunks on a stage: say where they lie in a first line, "
         "placement,v .or contiguous, round_robin"),
        ("placement,w\nF0,BW0\n", "placement 'w': write one of contiguous, round_robin, v"),
        ("placement\nF0,BW0\n", "placement '': write one of"),
    ],
)  # fmt: skip
def test_broken_files_are_refused(text, reason, tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=reason) as caught:
        load_schedule(str(path))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text_and_sizes_that_are_not_its_own(tmp_path):
    path = tmp_path / "table.csv"
    path.write_bytes(b"\x89PNG\xff\x00")
    with pytest.raises(ValueError, match="it is not text in UTF-8; write a CSV file"):
        load_schedule(str(path))
    write(build_schedule("1f1b", 2, 3), path)
    with pytest.raises(ValueError, match="stages=4, but .* has 2: write stages=2"):
        load_schedule(str(path), stages=4)
    with pytest.raises(ValueError, match="microbatches=2, but .* has 3: write microbatches=3"):
        load_schedule(str(path), microbatches=2)
    with pytest.raises(ValueError, match="only gpipe, 1f1b, interleaved have a uniform form"):
        load_schedule(str(path), uniform=True)


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


def test_slots_read_what_they_write():
    for text in ("", "F3", "B12.1", "W0", "BW3", "F4+BW3.1", "F4.1+B3+W2", "B3+W3.1"):
        assert write_slot(read_slot(text)) == text
    assert read_slot("F4+BW3.1") == (Op("F", 4), Op("B", 3, 1), Op("W", 3, 1))
    assert write_slot(read_slot("B3+W3")) == "BW3"


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


def test_finish_takes_no_more_rows_than_wait_at_once():
    """Interval colouring is optimal: rows = the most values alive in one phase."""
    for name in NAMES:
        schedule = build_schedule(name, 3, 6, 2 if name == "interleaved" else None)
        assert finish(name, 6, schedule.chunks, schedule.placement, schedule.table) == schedule
        alive = defaultdict(int)
        for value, (birth, death) in lifetimes(schedule).items():
            for moment in range(birth, death + 1):
                alive[value.buffer, value.stage, moment] += 1
        for buffer, rows in schedule.buffers.items():
            most = [count for (other, *_), count in alive.items() if other == buffer]
            assert rows == max(most, default=0)
