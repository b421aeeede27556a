"""Config sections `model`, the shape of a decoder-only transformer, and `remat`, what its backward
pass finds saved. No JAX here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Literal, get_args

from pydantic import Field
from pydantic.dataclasses import dataclass

from ..sharding.keys import INT32, STRICT, ReadWhen, check_read
from ..sharding.rules import Dim
from .expert_config import ExpertConfig

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


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TransformerConfig:
    vocab_size: Annotated[
        int, Field(gt=0, description="tokens the tokenizer knows, end-of-text included")
    ] = 257
    vocab_multiple: Annotated[
        int,
        Field(
            gt=0,
            description="stored vocabulary is padded up to a multiple of this, whatever the mesh",
        ),
    ] = 128
    layers: Annotated[int, Field(gt=0, description="decoder blocks")] = 3
    d_model: Annotated[int, Field(gt=0, description="width of the residual stream")] = 64
    heads: Annotated[int, Field(gt=0, description="query heads")] = 4
    kv_heads: Annotated[
        int | None, Field(gt=0, description="key and value heads; null: as many as heads")
    ] = None
    head_dim: Annotated[
        int | None, Field(gt=0, description="width of a head; null: d_model / heads")
    ] = None
    d_ff: Annotated[int, Field(gt=0, description="hidden width of the SwiGLU MLP")] = 192
    bias: Annotated[
        Literal["none", "qkv", "all"], Field(description="which projections carry biases")
    ] = "none"
    qk_norm: Annotated[
        bool, Field(description="RMSNorm on queries and keys per head, before RoPE")
    ] = False
    tie_embeddings: Annotated[
        bool, Field(description="one table for embedding and unembedding")
    ] = False
    rope_theta: Annotated[float, Field(gt=0, description="base of the rotary frequencies")] = (
        10_000.0
    )
    rope_scaling: Annotated[
        RopeScalingConfig, Field(description="RoPE for longer sequences than trained on before")
    ] = field(default_factory=RopeScalingConfig)
    norm_eps: Annotated[
        float, Field(gt=0, description="added to the mean square inside RMSNorm")
    ] = 1e-5
    window: Annotated[
        int | None,
        Field(gt=0, description="tokens a query sees, itself included; null: all before it"),
        INT32,
    ] = None
    attention_softcap: Annotated[
        float | None, Field(gt=0, description="scores become c·tanh(score/c); null: off")
    ] = None
    attention_sink: Annotated[
        bool,
        Field(
            description="one learned score a head for a key that all queries see and whose value "
            "is zero"
        ),
    ] = False
    attention_block: Annotated[
        int | None,
        Field(gt=0, description="most queries, and keys, that meet at once; null: 256"),
    ] = None
    logit_softcap: Annotated[
        float | None, Field(gt=0, description="logits become c·tanh(logit/c); null: off")
    ] = None
    init_std: Annotated[
        float | None,
        Field(gt=0, description="standard deviation of matrices at init; null: 1/sqrt(fan in)"),
    ] = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig(ExpertConfig, TransformerConfig):
    def __post_init__(self) -> None:
        if self.heads % self.num_kv_heads:
            raise ValueError(
                f"model.heads={self.heads} is not a multiple of model.kv_heads={self.num_kv_heads}"
            )
        if self.head_dim is None and self.d_model % self.heads:
            raise ValueError(
                f"model.d_model={self.d_model} is not a multiple of model.heads={self.heads}; "
                f"write model.head_dim=…"
            )
        if self.size_per_head % 2:
            raise ValueError(f"model.head_dim={self.size_per_head} is odd; RoPE turns pairs")
        self.check_experts()
        check_read(self, "model")
        if self.experts is not None and self.dense_layers >= self.layers:
            raise ValueError(
                f"model.dense_layers={self.dense_layers} leaves none of model.layers={self.layers} "
                f"to model.experts={self.experts}; write model.experts=null"
            )
        if self.experts is not None and self.bias == "all":
            raise ValueError(
                f"model.bias=all: the model.experts={self.experts} experts have no biases; "
                f"write model.bias=qkv"
            )

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def size_per_head(self) -> int:
        return self.head_dim or self.d_model // self.heads

    @property
    def expert_width(self) -> int:
        return self.expert_d_ff or self.d_ff

    @property
    def stacked(self) -> range:
        """Numbers of the layers that are alike, which the model stacks: all but the dense ones
        before experts.
        """
        return range(self.dense_layers, self.layers)

    @property
    def padded_vocab(self) -> int:
        """Rows of the stored tables: vocab_size rounded up to vocab_multiple."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def dims(self) -> list[Dim]:
        """The sizes a mesh must divide."""
        return [
            Dim("vocab", self.padded_vocab, "padded model.vocab_size"),
            Dim("embed", self.d_model, "model.d_model"),
            Dim("heads", self.heads, "model.heads"),
            Dim("kv_heads", self.num_kv_heads, "model.kv_heads"),
            *self._hidden(),
        ]

    def _hidden(self) -> Iterator[Dim]:
        if self.experts is None or self.dense_layers:
            yield Dim("mlp", self.d_ff, "model.d_ff")
        if self.experts is not None:
            yield Dim("expert", self.experts, "model.experts")
            yield Dim("expert_embed", self.d_model, "model.d_model")
            yield Dim("expert_mlp", self.expert_width, "hidden width of an expert")
            if self.shared_experts:
                shared = self.shared_experts * self.expert_width
                yield Dim("mlp", shared, "hidden width of the shared experts")


Saved = Literal[
    "block.input",
    "attention.norm",
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
