"""Config section `model.rope_scaling`: RoPE for sequences longer than before. No JAX here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from ...sharding.keys import STRICT, ReadWhen, check_read

BY_TURNS = ReadWhen("kind", ("yarn", "llama3"))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RopeScalingConfig:
    kind: Annotated[
        Literal["none", "linear", "ntk", "yarn", "llama3"],
        Field(description="how RoPE's frequencies are changed for longer sequences than trained"),
    ] = "none"
    factor: Annotated[
        float,
        Field(ge=1, description="how many times longer"),
        ReadWhen("kind", ("linear", "ntk", "yarn", "llama3")),
    ] = 1.0
    original: Annotated[
        int | None,
        Field(gt=0, description="yarn, llama3: tokens of the sequences trained on before"),
        BY_TURNS,
    ] = None
    low: Annotated[
        float | None,
        Field(
            gt=0,
            description="yarn, llama3: a pair of channels that turns fewer times than this within "
            "the original length is slowed down by the whole factor; null: 1",
        ),
        BY_TURNS,
    ] = None
    high: Annotated[
        float | None,
        Field(
            gt=0, description="and one that turns more often, not at all; null: yarn 32, llama3 4"
        ),
        BY_TURNS,
    ] = None

    def __post_init__(self) -> None:
        check_read(self, "model.rope_scaling")
        if BY_TURNS.holds(self) and self.original is None:
            raise ValueError(
                f"model.rope_scaling.original=null: model.rope_scaling.kind={self.kind} needs the "
                f"tokens of the sequences trained on before"
            )
        low, high = self.turns
        if low >= high:
            raise ValueError(
                f"model.rope_scaling.low={low} is not below model.rope_scaling.high={high}"
            )

    @property
    def turns(self) -> tuple[float, float]:
        """low and high with their defaults."""
        return self.low or 1.0, self.high or (32.0 if self.kind == "yarn" else 4.0)
