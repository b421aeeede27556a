"""How keys are declared: local paths, and keys that are read in some settings only."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field
from pydantic.dataclasses import dataclass

from meshwright.sharding.keys import STRICT, ReadWhen, check_local, check_read, user_path


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Section:
    rule: str = "plain"
    on: bool = False
    weight: float = 0.0
    size: int | None = None
    rate: Annotated[float | None, ReadWhen("rule", ("fast", "slow"))] = None
    ways: Annotated[int, Field(gt=0), ReadWhen("on")] = 1
    names: Annotated[list[str], ReadWhen("weight")] = field(default_factory=list)
    both: Annotated[int | None, ReadWhen("rule", ("fast",)), ReadWhen("size")] = None
    off: Annotated[bool | None, ReadWhen("on", (False,))] = None

    def __post_init__(self) -> None:
        check_read(self, "section")


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            {"rate": 1e-8},
            "section.rate=1e-8 is not read by section.rule=plain, only by fast, slow;",
        ),
        ({"ways": 2}, "section.ways=2 is not read by section.on=false; write section.on=true or"),
        (
            {"names": ["a", "b"]},
            "section.names=[a, b] is not read by section.weight=0.0; write sec",
        ),
        ({"both": 0}, "section.both=0 is not read by section.rule=plain, only by fast; leave it"),
        (
            {"both": 0, "rule": "fast"},
            "section.both=0 is not read by section.size=null; write section.size=… or leave it out",
        ),
        (
            {"off": False, "on": True},
            "section.off=false is not read by section.on=true, only by fal",
        ),
    ],
)
def test_a_key_that_nothing_reads_is_refused_with_who_would(keys, line):
    with pytest.raises(ValueError) as caught:
        Section(**keys)
    assert f"Value error, {line}" in str(caught.value)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"rate": None, "ways": 1, "names": []},
        {"rate": 1e-8, "rule": "slow"},
        {"ways": 2, "on": True},
        {"names": ["a"], "weight": 0.5},
        {"both": 1, "rule": "fast", "size": 3},
        {"off": False},
    ],
)
def test_a_key_that_is_read_or_left_at_its_default_is_accepted(keys):
    Section(**keys)


def test_a_url_is_no_local_path(tmp_path):
    for path in ("runs", tmp_path, "./gs:/b", "C:/x", "a:b/c"):
        check_local(path)
    with pytest.raises(ValueError) as caught:
        check_local("gs://b//x", "--png ")
    assert str(caught.value) == (
        "--png gs://b//x: URLs are not built yet; write a local path, or ./gs:/b/x for a folder of "
        "that name"
    )


@pytest.mark.parametrize("path", ["~nobody-of-that-name", "~nobody-of-that-name/runs"])
def test_a_home_folder_that_is_not_there_is_named_where_it_is_needed(path):
    with pytest.raises(ValueError, match=f"^{path}: there is no home folder of that user; write"):
        user_path(path)
    check_local(path)  # who only carries it does not need it
    assert user_path("~/runs") == Path.home() / "runs"
    assert user_path("./~x") == Path("~x")
    assert user_path("a~b") == Path("a~b")
