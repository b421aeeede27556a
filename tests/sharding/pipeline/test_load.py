"""Tables from CSV files, and schedules by name: what is read, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.sharding.pipeline.load import load_schedule
from meshwright.sharding.pipeline.schedules import (
    NAMES,
    UNIFORM,
    Schedule,
    build_schedule,
    write_slot,
)
from meshwright.sharding.pipeline.simulate import Costs, published, simulate


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
