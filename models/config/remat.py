"""Config section `remat`: what the backward pass finds saved. No JAX here."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field
from pydantic.dataclasses import dataclass

from ...sharding.keys import STRICT, ReadWhen, check_read

Saved = Literal[
    "block.input",
    "attention.norm",
    "attention.latent",
    "attention.qkv",
    "attention.context",
    "attention.logsumexp",
    "attention.out",
    "mlp.norm",
    "mlp.gate_up",
    "mlp.hidden",
]
"""Tensors of a block that its backward pass may want; docs/recomputation.md says what they are."""

CORE = ("attention.context", "attention.logsumexp")
"""Those that only the attention kernel computes."""

ROUTE = "moe.route"
"""Each token's experts, integers, which every policy saves: a recomputation that rounds otherwise
would choose others."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RematConfig:
    policy: Annotated[
        Literal["none", "full", "selective", "offload"],
        Field(
            description="none keeps activations; full recomputes each block; selective saves "
            "remat.names; offload saves them in the host's memory"
        ),
    ] = "none"
    names: Annotated[
        list[Saved] | None,
        Field(
            description="tensors of a block that selective and offload save; null: selective all "
            "but attention.context and attention.logsumexp, offload all"
        ),
        ReadWhen("policy", ("selective", "offload")),
    ] = None
    every: Annotated[
        int,
        Field(gt=0, description="only each n-th block is recomputed"),
        ReadWhen("policy", ("full", "selective", "offload")),
    ] = 1

    def __post_init__(self) -> None:
        check_read(self, "remat")

    @property
    def saved(self) -> tuple[str, ...] | None:
        """Names that a recomputed block saves; None: no block is recomputed."""
        if self.names is not None:
            return tuple(self.names)
        every = get_args(Saved)
        outside = tuple(name for name in every if name not in CORE)
        return {"none": None, "full": (), "selective": outside, "offload": every}[self.policy]
