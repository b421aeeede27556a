"""Config section `model.moe`: MLPs that are mixtures of experts. No JAX here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from ...sharding.keys import STRICT, ReadWhen, check_read
from ...sharding.rules import Dim

WITH_EXPERTS = ReadWhen("experts")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MoeConfig:
    experts: Annotated[
        int | None,
        Field(gt=0, description="experts of each MLP, of which a token meets a few; null: none"),
    ] = None
    experts_per_token: Annotated[
        int, Field(gt=0, description="experts that a token chooses"), WITH_EXPERTS
    ] = 2
    d_ff: Annotated[
        int | None,
        Field(gt=0, description="hidden width of an expert; null: model.d_ff"),
        WITH_EXPERTS,
    ] = None
    shared_experts: Annotated[
        int,
        Field(ge=0, description="further experts that every token meets, as one wider MLP"),
        WITH_EXPERTS,
    ] = 0
    scores: Annotated[
        Literal["softmax", "sigmoid"],
        Field(description="what the router makes of its products with a token"),
        WITH_EXPERTS,
    ] = "softmax"
    normalize_gates: Annotated[
        bool,
        Field(description="divide the scores of the chosen experts by their sum"),
        WITH_EXPERTS,
    ] = True
    gate_scale: Annotated[
        float,
        Field(gt=0, description="factor on what the chosen experts add up to"),
        WITH_EXPERTS,
    ] = 1.0
    groups: Annotated[
        int,
        Field(gt=0, description="groups of experts, each judged by its two best scores"),
        WITH_EXPERTS,
    ] = 1
    groups_per_token: Annotated[
        int | None,
        Field(gt=0, description="groups whose experts a token may choose; null: all"),
        WITH_EXPERTS,
    ] = None
    second_expert: Annotated[
        Literal["always", "random"],
        Field(
            description="random (GShard): in training the second expert is kept with a probability "
            "of twice its gate"
        ),
        WITH_EXPERTS,
    ] = "always"
    capacity_factor: Annotated[
        float | None,
        Field(
            gt=0,
            description="an expert takes from a routing group at most this times its even share; "
            "the residual stream alone carries the others. null: no token is dropped",
        ),
        WITH_EXPERTS,
    ] = None
    routing_group: Annotated[
        int | None,
        Field(gt=0, description="of capacity_factor: consecutive tokens of a row that compete"),
        ReadWhen("capacity_factor"),
    ] = None
    overflow: Annotated[
        Literal["position", "probability"],
        Field(
            description="of capacity_factor, who comes first: position, all first choices and then "
            "earlier tokens; probability, higher scores"
        ),
        ReadWhen("capacity_factor"),
    ] = "position"
    aux_loss: Annotated[
        float,
        Field(ge=0, description="weight of the loss that is least where experts share evenly"),
        WITH_EXPERTS,
    ] = 0.01
    aux_loss_over: Annotated[
        Literal["sequence", "microbatch"],
        Field(
            description="tokens over which aux_loss looks at shares: those of each document in a "
            "row, or of a micro-batch"
        ),
        ReadWhen("aux_loss"),
        WITH_EXPERTS,
    ] = "sequence"
    z_loss: Annotated[
        float,
        Field(ge=0, description="weight of the router's mean squared log-partition"),
        WITH_EXPERTS,
    ] = 0.0
    bias_update_rate: Annotated[
        float,
        Field(
            ge=0,
            description="balance without a loss: what each update adds to the choosing score of an "
            "expert with less than its share, and takes from one with more; 0: nothing",
        ),
        WITH_EXPERTS,
    ] = 0.0

    def __post_init__(self) -> None:
        check_read(self, "model.moe")
        if self.experts is None:
            return
        if self.experts % self.groups:
            raise ValueError(
                f"model.moe.experts={self.experts} is not a multiple of "
                f"model.moe.groups={self.groups}"
            )
        if (groups := self.groups_per_token or self.groups) > self.groups:
            raise ValueError(
                f"model.moe.groups_per_token={groups} is more than model.moe.groups={self.groups}"
            )
        allowed = self.experts // self.groups * groups
        if self.experts_per_token > allowed:
            where = f" in model.moe.groups_per_token={groups} groups" if groups > 1 else ""
            raise ValueError(
                f"model.moe.experts_per_token={self.experts_per_token} is more than the {allowed} "
                f"experts{where} that a token may choose"
            )
        if self.second_expert == "random" and self.experts_per_token != 2:
            raise ValueError(
                f"model.moe.second_expert=random needs model.moe.experts_per_token=2, "
                f"not {self.experts_per_token}"
            )
        if self.capacity_factor is not None and self.routing_group is None:
            raise ValueError(
                f"model.moe.routing_group=null: model.moe.capacity_factor={self.capacity_factor} "
                f"needs the number of tokens that compete; write model.moe.routing_group=64"
            )

    @property
    def slots(self) -> int | None:
        """Tokens of a routing group that an expert takes; None: all."""
        if self.capacity_factor is None or self.routing_group is None or self.experts is None:
            return None
        even = self.routing_group * self.experts_per_token / self.experts
        return min(math.ceil(even * self.capacity_factor), self.routing_group)

    def dims(self, d_model: int, d_ff: int) -> Iterator[Dim]:
        """The sizes a mesh must divide; d_ff: hidden width of an expert unless it has its own."""
        assert self.experts is not None
        width = self.d_ff or d_ff
        yield Dim("expert", self.experts, "model.moe.experts")
        yield Dim("expert_embed", d_model, "model.d_model")
        yield Dim("expert_mlp", width, "hidden width of an expert")
        if self.shared_experts:
            yield Dim("mlp", self.shared_experts * width, "hidden width of the shared experts")
