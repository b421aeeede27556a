"""Config section `model`: the shape of a decoder-only transformer. No JAX here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from ...sharding.keys import INT32, STRICT, ReadWhen, check_read
from ...sharding.rules import Dim
from .mla import MlaConfig
from .moe import MoeConfig
from .rope import RopeScalingConfig

Mixer = Literal["attention", "mla"]
Ffn = Literal["swiglu", "moe"]
Window = Annotated[int, Field(gt=0), INT32]

HEADS_OF_THEIR_OWN = ReadWhen("mixer", ("attention",))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LayerConfig:
    """One layer of `model.segments`."""

    mixer: Annotated[Mixer | None, Field(description="null: model.mixer")] = None
    ffn: Annotated[
        Ffn | None, Field(description="what follows it; null: moe where there are experts")
    ] = None
    window: Annotated[
        int | None, Field(gt=0, description="tokens a query sees; null: all before it"), INT32
    ] = None
    rope: Annotated[bool, Field(description="whether positions are told")] = True
    rope_theta: Annotated[float | None, Field(gt=0, description="null: model.rope_theta")] = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SegmentConfig:
    """Layers that follow one another, `repeats` times."""

    repeats: Annotated[int, Field(gt=0, description="how often the layers come")] = 1
    layers: Annotated[list[LayerConfig], Field(min_length=1, description="one after the other")]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
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
    norm: Annotated[
        Literal["pre", "post", "sandwich"],
        Field(
            description="where RMSNorm stands: before attention and MLP, behind them (on what they "
            "add to the residual stream), or both"
        ),
    ] = "pre"
    norm_eps: Annotated[
        float, Field(gt=0, description="added to the mean square inside RMSNorm")
    ] = 1e-5
    mixer: Annotated[
        Mixer,
        Field(
            description="what lets tokens see one another: attention, or mla, latent attention, "
            "see model.mla"
        ),
    ] = "attention"
    heads: Annotated[int, Field(gt=0, description="query heads")] = 4
    kv_heads: Annotated[
        int | None,
        Field(gt=0, description="key and value heads; null: as many as heads"),
        HEADS_OF_THEIR_OWN,
    ] = None
    head_dim: Annotated[
        int | None,
        Field(gt=0, description="width of a head; null: d_model / heads"),
        HEADS_OF_THEIR_OWN,
    ] = None
    qk_norm: Annotated[
        Literal["head", "all"] | None,
        Field(
            description="RMSNorm on queries and keys before RoPE, over each head or over all heads "
            "at once; null: none"
        ),
        HEADS_OF_THEIR_OWN,
    ] = None
    attention_gate: Annotated[
        bool,
        Field(
            description="multiply what attention gives by the sigmoid of a projection of its input"
        ),
    ] = False
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
    window: Annotated[
        int | None,
        Field(gt=0, description="tokens a query sees, itself included; null: all before it"),
        INT32,
        HEADS_OF_THEIR_OWN,
    ] = None
    window_pattern: Annotated[
        list[Window | None] | None,
        Field(
            min_length=1,
            description="the window of one layer after the other, from the start again when it "
            "ends, as in [1024, 1024, null]; null: model.window for all",
        ),
        HEADS_OF_THEIR_OWN,
    ] = None
    rope_theta: Annotated[float, Field(gt=0, description="base of the rotary frequencies")] = (
        10_000.0
    )
    local_rope_theta: Annotated[
        float | None,
        Field(
            gt=0,
            description="that of layers with a window, which then take no part in "
            "model.rope_scaling; null: the same",
        ),
        ReadWhen("window_pattern"),
    ] = None
    rope_pattern: Annotated[
        list[bool] | None,
        Field(
            min_length=1,
            description="which layers have RoPE, like model.window_pattern; null: all",
        ),
    ] = None
    rope_scaling: Annotated[
        RopeScalingConfig, Field(description="RoPE for longer sequences than trained on before")
    ] = field(default_factory=RopeScalingConfig)
    mla: Annotated[MlaConfig, Field(description="latent attention, of model.mixer=mla")] = field(
        default_factory=MlaConfig
    )
    d_ff: Annotated[int, Field(gt=0, description="hidden width of the SwiGLU MLP")] = 192
    moe: Annotated[MoeConfig, Field(description="mixtures of experts in place of MLPs")] = field(
        default_factory=MoeConfig
    )
    dense_layers: Annotated[
        int,
        Field(ge=0, description="of a model with experts: first blocks that keep an MLP of d_ff"),
    ] = 0
    segments: Annotated[
        list[SegmentConfig] | None,
        Field(
            min_length=1,
            description="layers of several kinds in any order, as in [{repeats: 2, layers: "
            "[{window: 64}, {ffn: moe}]}]; null: as the other keys say",
        ),
    ] = None
    bias: Annotated[
        Literal["none", "qkv", "all"],
        Field(description="which projections carry biases"),
        HEADS_OF_THEIR_OWN,
    ] = "none"
    tie_embeddings: Annotated[
        bool, Field(description="one table for embedding and unembedding")
    ] = False
    logit_softcap: Annotated[
        float | None, Field(gt=0, description="logits become c·tanh(logit/c); null: off")
    ] = None
    init_std: Annotated[
        float | None,
        Field(gt=0, description="standard deviation of matrices at init; null: 1/sqrt(fan in)"),
    ] = None

    def __post_init__(self) -> None:
        check_read(self, "model")
        self._check_segments()
        mixers, ffns = self.kinds
        if "attention" in mixers:
            self._check_heads()
        if ("mla" in mixers) != (self.mla.kv_rank is not None):
            raise ValueError(
                f"model.mla.kv_rank={_written(self.mla.kv_rank)} is "
                + (
                    "the width of the latent that model.mixer=mla needs; write "
                    "model.mla.kv_rank=512"
                    if "mla" in mixers
                    else "not read by model.mixer=attention; write model.mixer=mla or leave it out"
                )
            )
        if ("moe" in ffns) != (self.moe.experts is not None):
            raise ValueError(
                f"model.moe.experts={_written(self.moe.experts)}: no layer of model.segments has "
                f"them; write ffn: moe in one, or model.moe.experts=null"
                if self.moe.experts is not None
                else "model.moe.experts=null: layers of model.segments with ffn: moe need some; "
                "write model.moe.experts=8"
            )
        if self.moe.experts is None and self.dense_layers:
            raise ValueError(
                f"model.dense_layers={self.dense_layers} is not read by a model without experts; "
                f"write model.moe.experts=8 or leave it out"
            )
        if self.moe.experts is not None and self.dense_layers >= self.layers:
            raise ValueError(
                f"model.dense_layers={self.dense_layers} leaves none of model.layers={self.layers} "
                f"to model.moe.experts={self.moe.experts}; write model.moe.experts=null"
            )
        if self.moe.experts is not None and self.bias == "all":
            raise ValueError(
                f"model.bias=all: the model.moe.experts={self.moe.experts} experts have no biases; "
                f"write model.bias=qkv"
            )

    def _check_heads(self) -> None:
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

    def _check_segments(self) -> None:
        if self.window is not None and self.window_pattern is not None:
            raise ValueError(
                f"model.window={self.window} and model.window_pattern say the same thing; write "
                f"one of them"
            )
        if self.segments is None:
            return
        for key in ("window", "window_pattern", "rope_pattern", "dense_layers"):
            if value := getattr(self, key):
                raise ValueError(
                    f"model.{key}={_written(value)} is not read beside model.segments, whose "
                    f"layers have a window, rope and ffn of their own; leave one of them out"
                )
        count = sum(segment.repeats * len(segment.layers) for segment in self.segments)
        if count != self.layers:
            raise ValueError(
                f"model.segments has {count} layers, but model.layers={self.layers}; write "
                f"model.layers={count} or other segments"
            )
        mixers, _ = self.kinds
        if self.mixer not in mixers:
            raise ValueError(
                f"model.mixer={self.mixer} is that of no layer of model.segments; write "
                f"model.mixer={min(mixers)}"
            )
        for segment in self.segments:
            for layer in segment.layers:
                mixer = layer.mixer or self.mixer
                if layer.rope_theta is not None and not layer.rope:
                    raise ValueError(
                        f"model.segments: rope_theta: {layer.rope_theta} is not read with "
                        f"rope: false; leave one of them out"
                    )
                if layer.window is not None and mixer != "attention":
                    raise ValueError(
                        f"model.segments: window: {layer.window} is not read by mixer: {mixer}; "
                        f"only attention has windows"
                    )

    @property
    def kinds(self) -> tuple[set[str], set[str]]:
        """Kinds of mixers, and of what follows them, that layers have."""
        if self.segments is None:
            ffns = {"swiglu"} if self.moe.experts is None or self.dense_layers else set()
            return {self.mixer}, ffns | ({"moe"} if self.moe.experts is not None else set())
        layers = [layer for segment in self.segments for layer in segment.layers]
        return (
            {layer.mixer or self.mixer for layer in layers},
            {layer.ffn or self.usual_ffn for layer in layers},
        )

    @property
    def usual_ffn(self) -> Ffn:
        """What follows the mixer in a layer that does not say."""
        return "swiglu" if self.moe.experts is None else "moe"

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def size_per_head(self) -> int:
        return self.head_dim or self.d_model // self.heads

    @property
    def expert_width(self) -> int:
        return self.moe.d_ff or self.d_ff

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
            *self._dims_of_kinds(),
        ]

    def _dims_of_kinds(self) -> Iterator[Dim]:
        mixers, ffns = self.kinds
        if "attention" in mixers:
            yield Dim("kv_heads", self.num_kv_heads, "model.kv_heads")
        if "mla" in mixers:
            yield from self.mla.dims()
        if "swiglu" in ffns:
            yield Dim("mlp", self.d_ff, "model.d_ff")
        if "moe" in ffns:
            yield from self.moe.dims(self.d_model, self.d_ff)


def _written(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
