"""Keys of section `model` that make its MLPs mixtures of experts. No JAX here."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from ..sharding.keys import STRICT, ReadWhen


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ExpertConfig:
    experts: Annotated[
        int | None,
        Field(gt=0, description="experts of each MLP, of which a token meets a few; null: none"),
    ] = None
    experts_per_token: Annotated[int, Field(gt=0, description="experts that a token chooses")] = 2
    expert_d_ff: Annotated[
        int | None, Field(gt=0, description="hidden width of an expert; null: model.d_ff")
    ] = None
    shared_experts: Annotated[
        int, Field(ge=0, description="further experts that every token meets, as one wider MLP")
    ] = 0
    dense_layers: Annotated[
        int, Field(ge=0, description="first blocks that keep a dense MLP of model.d_ff")
    ] = 0
    router_scores: Annotated[
        Literal["softmax", "sigmoid"],
        Field(description="what the router makes of its products with a token"),
    ] = "softmax"
    normalize_gates: Annotated[
        bool, Field(description="divide the scores of the chosen experts by their sum")
    ] = True
    gate_scale: Annotated[
        float, Field(gt=0, description="factor on what the chosen experts add up to")
    ] = 1.0
    expert_groups: Annotated[
        int, Field(gt=0, description="groups of experts, each judged by its two best scores")
    ] = 1
    groups_per_token: Annotated[
        int | None,
        Field(gt=0, description="groups whose experts a token may choose; null: all"),
    ] = None
    random_second: Annotated[
        bool,
        Field(
            description="in training the second expert is left out with probability 1 - 2 × its "
            "gate (GShard)"
        ),
    ] = False
    capacity: Annotated[
        float | None,
        Field(
            gt=0,
            description="an expert takes from a routing group at most this times its even share; "
            "the residual stream alone carries the others. null: no token is dropped",
        ),
    ] = None
    routing_group: Annotated[
        int | None,
        Field(gt=0, description="of model.capacity: consecutive tokens of a row that compete"),
        ReadWhen("capacity"),
    ] = None
    overflow: Annotated[
        Literal["position", "probability"],
        Field(
            description="of model.capacity, who comes first: position, all first choices and then "
            "earlier tokens; probability, higher scores"
        ),
        ReadWhen("capacity"),
    ] = "position"
    balance_loss: Annotated[
        float,
        Field(ge=0, description="weight of the loss that is least where experts share evenly"),
    ] = 0.01
    balance: Annotated[
        Literal["sequence", "microbatch"],
        Field(
            description="tokens over which model.balance_loss looks at shares: those of each "
            "document in a row, or of a micro-batch"
        ),
        ReadWhen("balance_loss"),
    ] = "sequence"
    router_z_loss: Annotated[
        float, Field(ge=0, description="weight of the router's mean squared log-partition")
    ] = 0.0
    balance_bias: Annotated[
        float,
        Field(
            ge=0,
            description="what each update adds to the choosing score of an expert with less than "
            "its share, and takes from one with more; 0: nothing",
        ),
    ] = 0.0

    def check_experts(self) -> None:
        """Raises ValueError where these keys contradict each other, or nothing reads them."""
        if self.experts is None:
            for key in fields(ExpertConfig):
                if (value := getattr(self, key.name)) != key.default:
                    raise ValueError(
                        f"model.{key.name}={_written(value)} is not read by a model without "
                        f"experts; write model.experts=8 or leave it out"
                    )
            return
        if self.experts % self.expert_groups:
            raise ValueError(
                f"model.experts={self.experts} is not a multiple of "
                f"model.expert_groups={self.expert_groups}"
            )
        if (groups := self.groups_per_token or self.expert_groups) > self.expert_groups:
            raise ValueError(
                f"model.groups_per_token={groups} is more than "
                f"model.expert_groups={self.expert_groups}"
            )
        allowed = self.experts // self.expert_groups * groups
        if self.experts_per_token > allowed:
            where = f" in model.groups_per_token={groups} groups" if groups > 1 else ""
            raise ValueError(
                f"model.experts_per_token={self.experts_per_token} is more than the {allowed} "
                f"experts{where} that a token may choose"
            )
        if self.random_second and self.experts_per_token != 2:
            raise ValueError(
                f"model.random_second=true needs model.experts_per_token=2, "
                f"not {self.experts_per_token}"
            )
        if self.capacity is not None and self.routing_group is None:
            raise ValueError(
                f"model.routing_group=null: model.capacity={self.capacity} needs the number of "
                f"tokens that compete; write model.routing_group=64"
            )

    @property
    def slots(self) -> int | None:
        """Tokens of a routing group that an expert takes; None: all."""
        if self.capacity is None or self.routing_group is None or self.experts is None:
            return None
        even = self.routing_group * self.experts_per_token / self.experts
        return min(math.ceil(even * self.capacity), self.routing_group)


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
