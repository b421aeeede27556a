"""Config section `precision`. No JAX here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from ...sharding.keys import STRICT, ReadWhen, check_read


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PrecisionConfig:
    compute: Annotated[
        Literal["f32", "bf16", "f16"],
        Field(
            description="dtype of activations and matmul operands; masters, norms, softmax, loss "
            "and gradients are f32"
        ),
    ] = "f32"
    reduce: Annotated[
        Literal["f32", "bf16"],
        Field(
            description="dtype in which gradients travel and are added up over devices; over "
            "micro-batches always f32"
        ),
    ] = "f32"
    loss_scale: Annotated[
        Literal["torch", "megatron"] | None,
        Field(
            description="f16: how the loss scale moves. torch: from 2^16, half at each overflow, "
            "double after 2000 attempts without; megatron: from 2^32, half from the second "
            "overflow on, double after 1000. null: torch"
        ),
        ReadWhen("compute", ("f16",)),
    ] = None
    first_scale: Annotated[
        float | None,
        Field(
            ge=1,
            le=2.0**127,
            description="f16: first loss scale; null: that of precision.loss_scale",
        ),
        ReadWhen("compute", ("f16",)),
    ] = None

    def __post_init__(self) -> None:
        check_read(self, "precision")
