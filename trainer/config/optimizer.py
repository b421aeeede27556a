"""Config section `optimizer`. No JAX here."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from ...sharding.keys import INT32, STRICT, ReadWhen, check_read


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GroupConfig:
    lr: Annotated[
        float,
        Field(ge=0, description="factor on optimizer.lr; 0 keeps these parameters as they are"),
    ] = 1.0
    weight_decay: Annotated[
        float | None,
        Field(
            ge=0,
            description="null: for embedding and matrix optimizer.weight_decay, for others 0",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GroupsConfig:
    embedding: Annotated[GroupConfig, Field(description="tables of the vocabulary")] = field(
        default_factory=GroupConfig
    )
    matrix: Annotated[GroupConfig, Field(description="matrices of the blocks")] = field(
        default_factory=GroupConfig
    )
    norm: Annotated[GroupConfig, Field(description="scales of norms")] = field(
        default_factory=GroupConfig
    )
    bias: Annotated[GroupConfig, Field(description="biases")] = field(default_factory=GroupConfig)


class RuleSettings(NamedTuple):
    """What `null` stands for in the keys of section `optimizer` that belong to some of its rules
    and schedules. They are null until they are written, so that one that nothing reads is noticed.
    """

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.0
    nesterov: bool = False
    min_dim_size_to_factor: int = 128
    final_ratio: float = 0.1


TOKENS = "tokens"
"""Behind a number: what it counts."""


def _check_warmup(value: Any) -> Any:
    updates = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if updates or isinstance(value, str) and re.fullmatch(rf"[1-9][0-9]{{0,17}}{TOKENS}", value):
        return value
    raise PydanticCustomError(
        "warmup", "should be a number of updates, or of tokens as in 2000000tokens"
    )


BF16_STEP = 2**-8
"""Relative change that bf16 may round away: it has 8 significant bits."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerConfig:
    name: Annotated[
        Literal["adamw", "lion", "adafactor", "sgd", "muon", "lamb"],
        Field(description="update rule"),
    ] = "adamw"
    lr: Annotated[float, Field(gt=0, description="peak learning rate")] = 1e-3
    schedule: Annotated[
        Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"],
        Field(description="shape of the rate after warm-up"),
    ] = "cosine"
    warmup: Annotated[
        int | str,
        BeforeValidator(_check_warmup),
        Field(
            description="length of linear warm-up in updates, or in tokens, padding included, as "
            "in 2000000tokens"
        ),
    ] = 0
    cooldown: Annotated[
        int | None,
        Field(gt=0, description="updates of the final decay of wsd; null: a fifth of train.steps"),
        INT32,
        ReadWhen("schedule", ("wsd",)),
    ] = None
    final_ratio: Annotated[
        float | None,
        Field(
            ge=0,
            le=1,
            description="cosine, linear, wsd: last learning rate as a share of the peak; null: 0.1",
        ),
        ReadWhen("schedule", ("cosine", "linear", "wsd")),
    ] = None
    weight_decay: Annotated[
        float, Field(ge=0, description="decoupled decay per unit of learning rate")
    ] = 0.1
    groups: Annotated[
        GroupsConfig, Field(description="what differs by the role of a parameter")
    ] = field(default_factory=GroupsConfig)
    b1: Annotated[
        float | None,
        Field(
            ge=0,
            lt=1,
            description="adamw, lamb, lion, muon: decay of the first moment; null: 0.9",
        ),
        ReadWhen("name", ("adamw", "lamb", "lion", "muon")),
    ] = None
    b2: Annotated[
        float | None,
        Field(
            ge=0,
            lt=1,
            description="adamw, lamb, muon: decay of the second moment; lion: see its paper; "
            "null: 0.95",
        ),
        ReadWhen("name", ("adamw", "lamb", "lion", "muon")),
    ] = None
    eps: Annotated[
        float | None,
        Field(
            gt=0,
            description="adamw, lamb, muon: added to the root of the second moment; null: 1e-8",
        ),
        ReadWhen("name", ("adamw", "lamb", "muon")),
    ] = None
    momentum: Annotated[
        float | None,
        Field(ge=0, lt=1, description="of sgd, heavy ball; null: 0, none. Of muon; null: 0.95"),
        ReadWhen("name", ("sgd", "muon")),
    ] = None
    nesterov: Annotated[
        bool | None,
        Field(description="sgd, adamw, lamb: Nesterov's momentum; null: false. muon always has it"),
        ReadWhen("name", ("sgd", "adamw", "lamb")),
    ] = None
    min_dim_size_to_factor: Annotated[
        int | None,
        Field(
            gt=0,
            description="adafactor: shorter side from which on a matrix's second moment is kept "
            "as row and column means; null: 128",
        ),
        ReadWhen("name", ("adafactor",)),
    ] = None
    moments: Annotated[
        Literal["f32", "bf16"], Field(description="dtype that moments are kept in between updates")
    ] = "f32"
    ema: Annotated[
        float | None,
        Field(
            gt=0,
            lt=1,
            description="decay of the average of parameters, f32, that is evaluated and generates; "
            "null: no average",
        ),
    ] = None
    clip: Annotated[
        float | None, Field(gt=0, description="largest global gradient norm; null: no clipping")
    ] = 1.0

    def __post_init__(self) -> None:
        check_read(self, "optimizer")
        momentum = "null" if self.momentum is None else self.momentum
        if self.name == "sgd" and self.nesterov and not self.momentum:
            raise ValueError(
                f"optimizer.nesterov=true needs momentum, but optimizer.momentum={momentum}; "
                f"write optimizer.momentum=0.9"
            )
        if self.name == "sgd" and self.moments != "f32" and not self.momentum:
            raise ValueError(
                f"optimizer.moments={self.moments} is not read by optimizer.name=sgd with "
                f"optimizer.momentum={momentum}, which keeps no moment; leave it out"
            )
        if self.moments == "bf16":
            self._check_bf16()

    def _check_bf16(self) -> None:
        """A mean in bf16 sticks where its decay per update is less than what bf16 resolves."""
        if self.name == "adafactor":
            raise ValueError(
                "optimizer.moments=bf16 cannot hold the second moment of optimizer.name=adafactor, "
                "a mean over more and more updates; write optimizer.moments=f32"
            )
        read = {"sgd": ["momentum"], "muon": ["momentum", "b1", "b2"]}.get(self.name, ["b1", "b2"])
        for key in read:
            decay = getattr(self.settings, key)
            if 1 - decay < BF16_STEP:
                raise ValueError(
                    f"optimizer.moments=bf16 cannot hold a mean with optimizer.{key}={decay}: bf16 "
                    f"rounds changes below {BF16_STEP} away; write optimizer.{key}=0.99 or "
                    f"optimizer.moments=f32"
                )

    @property
    def settings(self) -> RuleSettings:
        """The keys that are null until they are written, with what null stands for."""
        usual = RuleSettings(momentum=0.95 if self.name == "muon" else 0.0)
        values = {key: getattr(self, key) for key in usual._fields}
        return usual._replace(**{key: v for key, v in values.items() if v is not None})

    def warmup_updates(self, tokens_per_update: int) -> int:
        """Updates of warm-up, the last one begun where it is counted in tokens."""
        if isinstance(self.warmup, int):
            return self.warmup
        return -(-int(self.warmup.removesuffix(TOKENS)) // tokens_per_update)

    def cooldown_updates(self, steps: int) -> int:
        """Updates of wsd's final decay in a run of `steps`."""
        return self.cooldown or max(steps // 5, 1)

    def decay_of(self, role: str) -> float:
        """Weight decay of the parameters with this role."""
        own = getattr(self.groups, role).weight_decay
        if own is not None:
            return own
        return self.weight_decay if role in ("embedding", "matrix") else 0.0
