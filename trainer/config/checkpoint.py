"""Config section `checkpoint`. No JAX here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from ...sharding.keys import STRICT, LocalPath


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    every: Annotated[
        int, Field(ge=0, description="updates between checkpoints; 0: only at the end")
    ] = 0
    keep: Annotated[int, Field(gt=0, description="newest checkpoints kept")] = 1
    keep_best: Annotated[
        bool, Field(description="keep the one with the lowest held-out loss as well")
    ] = True
    resume: Annotated[
        Literal["never", "auto", "must"],
        Field(
            description="an existing run folder: never is refused; auto goes on from its newest "
            "checkpoint, and starts a new run where there is none; must refuses to start a new run"
        ),
    ] = "never"
    fallback: Annotated[
        bool,
        Field(description="resume from the newest undamaged checkpoint if the newest is damaged"),
    ] = False
    init_from: Annotated[
        LocalPath | None,
        Field(
            description="run folder, or one checkpoint in it, whose parameters a new run starts "
            "from; null: random ones"
        ),
    ] = None
    asynchronous: Annotated[
        bool, Field(description="write while training goes on; false: training waits")
    ] = True
    required: Annotated[
        bool,
        Field(description="stop when the disk refuses; false: say so, go on, and exit with 1"),
    ] = True
    grace: Annotated[
        float,
        Field(
            gt=0,
            description="seconds from SIGTERM, SIGHUP or Ctrl-C until the run ends, saved or not",
        ),
    ] = 30.0
