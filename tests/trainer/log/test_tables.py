"""Tables of names, figures and remarks."""

from __future__ import annotations

from meshwright.trainer.log.tables import in_columns


def test_columns_are_as_wide_as_their_cells():
    rows = [["a", "times", "for"], ["a long name", "9,999,999,999", "x, [y]"], ["b"]]
    assert in_columns(rows, figures=1) == [
        "a                    times  for",
        "a long name  9,999,999,999  x, [y]",
        "b",
    ]


def test_a_long_line_is_not_cut():
    (line,) = in_columns([["name", "x " * 500 + "end"]])
    assert line == "name  " + "x " * 500 + "end"
