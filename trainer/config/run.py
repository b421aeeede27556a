"""Config sections `run` and `train`. No JAX here."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from ...sharding.keys import INT32, STRICT, LocalPath, ReadWhen, check_read

AUTO = "auto"
"""As run.name: a new name each time, so that a notebook's cell may run again."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig:
    name: Annotated[
        str,
        Field(
            min_length=1,
            description="name of the run and of its folder in run.dir; auto: the first of run-1, "
            "run-2, … that is free",
        ),
    ] = "run"
    dir: Annotated[LocalPath, Field(description="folder that holds run folders")] = "runs"
    seed: Annotated[
        int, Field(ge=0, lt=2**32, description="seed of initialisation and of the data order")
    ] = 0

    def __post_init__(self) -> None:
        if self.name in (".", "..") or set(self.name) & set("/\\") or not self.name.isprintable():
            raise ValueError(
                f"run.name={self.name}: should be a name, not a path; run.dir is the path"
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainConfig:
    steps: Annotated[int, Field(gt=0, description="optimizer updates"), INT32] = 400
    batch_size: Annotated[
        int,
        Field(gt=0, description="sequences per update, over the whole mesh"),
        INT32,
    ] = 32
    seq_len: Annotated[int, Field(gt=0, description="tokens per row"), INT32] = 128
    microbatches: Annotated[
        int, Field(gt=0, description="pieces a batch is accumulated over"), INT32
    ] = 1
    eval_every: Annotated[
        int, Field(ge=0, description="updates between evaluations; 0: only at the end")
    ] = 0
    eval_batch_size: Annotated[
        int | None,
        Field(gt=0, description="sequences per evaluation batch; null: train.batch_size"),
        INT32,
    ] = None
    z_loss: Annotated[
        float, Field(ge=0, description="weight of the mean squared log-partition")
    ] = 0.0
    label_smoothing: Annotated[
        float, Field(ge=0, lt=1, description="probability mass spread over the whole vocabulary")
    ] = 0.0
    dropout: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="probability that a channel of the embedding or of a sublayer's output is "
            "zero",
        ),
    ] = 0.0
    max_skipped: Annotated[
        int,
        Field(
            ge=0,
            description="attempts in a row that may be skipped because loss or gradient norm was "
            "not finite",
        ),
        ReadWhen("halt_on_nan", (False,)),
    ] = 40
    halt_on_nan: Annotated[
        bool,
        Field(
            description="end at the first attempt that would be skipped, and name the parameters "
            "and micro-batches whose gradients were not finite"
        ),
    ] = False

    def __post_init__(self) -> None:
        check_read(self, "train")
        if self.batch_size % self.microbatches:
            raise ValueError(
                f"train.batch_size={self.batch_size} is not a multiple of "
                f"train.microbatches={self.microbatches}"
            )

    @property
    def tokens_per_update(self) -> int:
        return self.batch_size * self.seq_len
