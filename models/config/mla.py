"""Config section `model.mla`: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). No JAX
here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from ...sharding.keys import STRICT, ReadWhen, check_read
from ...sharding.rules import Dim

WITH_LATENT = ReadWhen("kv_rank")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MlaConfig:
    kv_rank: Annotated[
        int | None,
        Field(
            gt=0,
            description="width of the latent that keys and values are made of, and that decoding "
            "caches; null: no latent attention",
        ),
    ] = None
    q_rank: Annotated[
        int | None,
        Field(gt=0, description="width of the queries' latent; null: queries have none"),
        WITH_LATENT,
    ] = None
    nope_dim: Annotated[
        int,
        Field(gt=0, description="width of a head's queries and keys without RoPE"),
        WITH_LATENT,
    ] = 128
    rope_dim: Annotated[
        int,
        Field(gt=0, description="and of those with RoPE, whose key all heads share"),
        WITH_LATENT,
    ] = 64
    value_dim: Annotated[int, Field(gt=0, description="width of a head's values"), WITH_LATENT] = (
        128
    )

    def __post_init__(self) -> None:
        check_read(self, "model.mla")
        if self.rope_dim % 2:
            raise ValueError(f"model.mla.rope_dim={self.rope_dim} is odd; RoPE turns pairs")

    def dims(self) -> Iterator[Dim]:
        """The sizes a mesh must divide, beside the heads."""
        assert self.kv_rank is not None
        yield Dim("latent", self.kv_rank, "model.mla.kv_rank")
        if self.q_rank is not None:
            yield Dim("latent", self.q_rank, "model.mla.q_rank")
