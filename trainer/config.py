"""The config tree: every section in one frozen, typed value. No JAX here; see also `load.py`."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Annotated, Literal, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from ..models import pattern
from ..models.config import ModelConfig, RematConfig
from ..sharding.config import LayoutConfig, MeshConfig
from ..sharding.keys import INT32, STRICT, LocalPath, ReadWhen, check_read
from ..sharding.pipeline.schedules import Schedule, held_depths
from ..sharding.rules import Dim, mesh_sizes, refuse_permutes, resolve

AUTO = "auto"
"""As run.name: a new name each time, so that a notebook's cell may run again."""

SMALLEST_VOCABULARY = 257
"""Every tokenizer knows the 256 bytes and end-of-text."""


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
    factor_from: int = 128
    final_ratio: float = 0.1


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
    warmup: Annotated[int, Field(ge=0, description="updates of linear warm-up"), INT32] = 0
    warmup_tokens: Annotated[
        int | None,
        Field(
            gt=0, description="tokens of linear warm-up, padding included; null: optimizer.warmup"
        ),
    ] = None
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
    factor_from: Annotated[
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
        if self.warmup and self.warmup_tokens is not None:
            raise ValueError(
                f"optimizer.warmup={self.warmup} and optimizer.warmup_tokens={self.warmup_tokens} "
                f"say the same thing; write one of them"
            )
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
        """Updates of warm-up, the last one begun by optimizer.warmup_tokens counted whole."""
        if self.warmup_tokens is None:
            return self.warmup
        return -(-self.warmup_tokens // tokens_per_update)

    def cooldown_updates(self, steps: int) -> int:
        """Updates of wsd's final decay in a run of `steps`."""
        return self.cooldown or max(steps // 5, 1)

    def decay_of(self, role: str) -> float:
        """Weight decay of the parameters with this role."""
        own = getattr(self.groups, role).weight_decay
        if own is not None:
            return own
        return self.weight_decay if role in ("embedding", "matrix") else 0.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    source: Annotated[
        Literal["stdlib", "text", "jsonl", "store"],
        Field(
            description="stdlib: the sources of Python's own library; text, jsonl: files of "
            "data.paths; store: an existing token store at data.store"
        ),
    ] = "stdlib"
    paths: Annotated[
        list[LocalPath], Field(description="files or globs, ** allowed, for text and jsonl")
    ] = field(default_factory=list)
    field: Annotated[
        str,
        Field(description="jsonl: the key that holds a document's text"),
        ReadWhen("source", ("jsonl",)),
    ] = "text"
    tokenizer: Annotated[
        Literal["byte", "bpe"],
        Field(
            description="byte: 256 bytes and end-of-text; bpe: trained on the training "
            "documents to model.vocab_size"
        ),
    ] = "byte"
    holdout: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="share of documents held out, chosen by a hash of their name; 0: none, and "
            "nothing is evaluated",
        ),
    ] = 0.02
    store: Annotated[
        LocalPath | None,
        Field(
            description="folder of the token store; null: the user's cache, keyed by "
            "source and tokenizer"
        ),
    ] = None
    prefetch: Annotated[int, Field(ge=0, description="batches prepared ahead")] = 2

    def __post_init__(self) -> None:
        if self.source in ("text", "jsonl") and not self.paths:
            raise ValueError(f"data.paths=[]: data.source={self.source} needs files or globs")
        if self.source in ("stdlib", "store") and self.paths:
            raise ValueError(
                f"data.paths=[{', '.join(self.paths)}] is not read by data.source={self.source}; "
                f"write data.source=text or data.source=jsonl"
            )
        check_read(self, "data")
        if self.source == "store" and self.store is None:
            raise ValueError("data.store=null: data.source=store needs the folder of a token store")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    every: Annotated[
        int, Field(ge=0, description="updates between checkpoints; 0: only at the end")
    ] = 0
    keep: Annotated[int, Field(gt=0, description="newest checkpoints kept")] = 1
    keep_best: Annotated[
        bool, Field(description="keep the one with the lowest held-out loss as well")
    ] = True
    resume: Annotated[
        Literal["never", "auto", "must"],
        Field(
            description="an existing run folder: never is refused; auto goes on from its newest "
            "checkpoint, and starts a new run where there is none; must refuses to start a new run"
        ),
    ] = "never"
    fallback: Annotated[
        bool,
        Field(description="resume from the newest undamaged checkpoint if the newest is damaged"),
    ] = False
    init_from: Annotated[
        LocalPath | None,
        Field(
            description="run folder, or one checkpoint in it, whose parameters a new run starts "
            "from; null: random ones"
        ),
    ] = None
    background: Annotated[
        bool, Field(description="write while training goes on; false: training waits")
    ] = True
    required: Annotated[
        bool,
        Field(description="stop when the disk refuses; false: say so, go on, and exit with 1"),
    ] = True
    grace: Annotated[
        float,
        Field(
            gt=0,
            description="seconds from SIGTERM, SIGHUP or Ctrl-C until the run ends, saved or not",
        ),
    ] = 30.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LogConfig:
    every: Annotated[int, Field(gt=0, description="updates between plain console lines")] = 10
    sample: Annotated[
        str | None,
        Field(min_length=1, description="prompt that a finished run continues; null: none"),
    ] = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DeviceConfig:
    platform: Annotated[
        Literal["cpu", "gpu", "tpu"] | None, Field(description="accelerator; null: what JAX finds")
    ] = None
    cpu_devices: Annotated[
        int | None,
        Field(
            gt=0,
            description="simulate this many devices on each process's CPU; null: do not simulate",
        ),
    ] = None
    coordinator: Annotated[
        str | None,
        Field(
            pattern=r":\d+$",
            description="host:port of process 0; null: from the scheduler's environment, if any",
        ),
    ] = None
    process_id: Annotated[
        int | None, Field(ge=0, description="this process's number; null: from the scheduler")
    ] = None
    process_count: Annotated[
        int | None,
        Field(
            gt=0,
            description="processes expected; null: as many as the scheduler says; 1: just this "
            "one, whatever the scheduler says",
        ),
    ] = None
    count: Annotated[
        int | None, Field(gt=0, description="devices expected over all processes; null: any")
    ] = None
    timeout: Annotated[
        float,
        Field(
            gt=0,
            description="seconds until a process that waits for another in vain ends with an error",
        ),
    ] = 300.0
    compile_cache: Annotated[
        LocalPath | None,
        Field(
            description="folder of XLA's persistent cache; 'auto': the user's cache folder; "
            "null: off"
        ),
    ] = "auto"
    peak_flops: Annotated[
        float | None,
        Field(gt=0, description="peak FLOP/s of one device for MFU; null: by device kind"),
    ] = None

    def __post_init__(self) -> None:
        if self.cpu_devices is not None and self.platform not in (None, "cpu"):
            raise ValueError(
                f"device.cpu_devices={self.cpu_devices} simulates CPU devices, but device.platform="
                f"{self.platform}; write device.cpu_devices=null or device.platform=cpu"
            )
        explicit = {
            "device.coordinator": self.coordinator,
            "device.process_id": self.process_id,
            "device.process_count": self.process_count,
        }
        given = {key for key, value in explicit.items() if value is not None}
        if given - {"device.process_count"} and len(given) < len(explicit):
            written = ", ".join(f"{key}={explicit[key]}" for key in explicit if key in given)
            missing = " and ".join(key for key in explicit if key not in given)
            raise ValueError(f"{written}: {missing} is missing; write all three, or none")
        if (
            self.process_id is not None
            and self.process_count is not None
            and self.process_id >= self.process_count
        ):
            raise ValueError(
                f"device.process_id={self.process_id} is not below "
                f"device.process_count={self.process_count}"
            )

    def stated_devices(self) -> dict[str, int]:
        """Config keys whose product is the number of devices over all processes; none: unknown."""
        if self.count is not None:
            return {"device.count": self.count}
        if self.cpu_devices is None:
            return {}
        processes = self.process_count or 1
        stated = {"device.cpu_devices": self.cpu_devices}
        return stated | ({"device.process_count": processes} if processes > 1 else {})


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    remat: RematConfig = field(default_factory=RematConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)

    def __post_init__(self) -> None:
        """What sections must agree on; what needs the real devices is checked when JAX is up."""
        train, optimizer, data = self.train, self.optimizer, self.data
        if self.run.name == AUTO and self.checkpoint.resume != "never":
            raise ValueError(
                f"run.name={AUTO} begins a new run each time, which checkpoint.resume="
                f"{self.checkpoint.resume} cannot go on with; write the name of the run"
            )
        stated = self.device.stated_devices()
        devices = math.prod(stated.values()) if stated else None
        if devices is None and -1 not in self.mesh.sizes().values():
            devices = math.prod(self.mesh.sizes().values())
        if devices is not None:
            try:
                sizes = mesh_sizes(self.mesh, devices)
            except ValueError as error:
                source = " · ".join(f"{key}={count}" for key, count in stated.items())
                raise ValueError(f"{source}: {error}") from None
            resolve(self.layout, sizes, self.dims())
        if train.dropout and train.seq_len * self.model.d_model > 2**32:
            raise ValueError(
                f"train.dropout={train.dropout}: a row has train.seq_len={train.seq_len} times "
                f"model.d_model={self.model.d_model} elements, of which masks tell 2^32 apart; "
                f"write train.dropout=0"
            )
        moe = self.model.moe
        choices = train.tokens_per_update * moe.experts_per_token
        if moe.experts is not None and choices >= 2**31:
            raise ValueError(
                f"train.batch_size={train.batch_size} times train.seq_len={train.seq_len} times "
                f"model.moe.experts_per_token={moe.experts_per_token} are {choices} choices of "
                f"experts; write fewer than 2147483648"
            )
        if train.halt_on_nan and self.precision.compute == "f16":
            raise ValueError(
                "train.halt_on_nan=true would end the run at an ordinary overflow of the loss "
                "scale of precision.compute=f16; write train.halt_on_nan=false"
            )
        if moe.experts is None and self.layout.experts != ["expert"]:
            raise ValueError(
                f"layout.experts=[{', '.join(self.layout.experts)}] is not read by a model without "
                f"experts; write model.moe.experts=8 or leave it out"
            )
        biased = self.model.bias != "none" or self.model.attention_sink
        if optimizer.groups.bias != GroupConfig() and not biased:
            raise ValueError(
                f"optimizer.groups.bias: a model with model.bias={self.model.bias} and "
                f"model.attention_sink=false has no biases; leave it out"
            )
        if (group := moe.routing_group) and train.seq_len % group:
            raise ValueError(
                f"train.seq_len={train.seq_len} is not a multiple of "
                f"model.moe.routing_group={group}"
            )
        warmup = optimizer.warmup_updates(train.tokens_per_update)
        if warmup >= 2**31:
            raise ValueError(
                f"optimizer.warmup_tokens={optimizer.warmup_tokens} are {warmup} updates; write "
                f"fewer than 2147483648 of them"
            )
        pieces, written = 1, f"model.layers={self.model.layers}"
        if (schedule := self.pipeline()) is not None:
            if self.remat.policy == "offload":
                raise ValueError(
                    f"remat.policy=offload on mesh.pipe={self.mesh.pipe}: what waits between a "
                    f"stage's passes stays on the device; write remat.policy=selective or full"
                )
            pieces = schedule.stages * schedule.chunks
            written += f" on mesh.pipe={self.mesh.pipe}, {pieces} pieces in all,"
        if self.model.layers < pieces:
            raise ValueError(f"{written} leaves some without any; write at least {pieces}")
        slots = pattern.slots(pattern.layers(self.model), pieces)
        for segment in pattern.segments([slot.options for slot in slots]):
            if segment.repeats % self.remat.every:
                alike = f"has {segment.repeats} repeat(s) of {segment.period} layer(s) in a row"
                raise ValueError(
                    f"{written} {alike}, not a multiple of remat.every={self.remat.every}"
                )
        if any(len(slot.options) > 1 for slot in slots):
            refuse_permutes(
                self.layout,
                self.mesh.sizes(),
                f"{written} has stages whose layers differ: they run",
            )
        cooldown = optimizer.cooldown_updates(train.steps)
        if optimizer.schedule == "wsd" and warmup + cooldown > train.steps:
            written = f"optimizer.warmup={warmup}"
            if optimizer.warmup_tokens is not None:
                written = f"optimizer.warmup_tokens={optimizer.warmup_tokens}, {warmup} updates,"
            raise ValueError(
                f"{written} and optimizer.cooldown={cooldown} "
                f"are together longer than train.steps={train.steps}"
            )
        if data.source != "store" and data.holdout == 0 and train.eval_every:
            raise ValueError(
                f"data.holdout=0 leaves nothing that train.eval_every={train.eval_every} could "
                f"evaluate; write train.eval_every=0"
            )
        if data.source != "store" and self.model.vocab_size < SMALLEST_VOCABULARY:
            raise ValueError(
                f"model.vocab_size={self.model.vocab_size}: data.tokenizer={data.tokenizer} "
                f"needs at least {SMALLEST_VOCABULARY}, 256 bytes and end-of-text"
            )

    def pipeline(self) -> Schedule | None:
        """The checked table by which micro-batches pass the stages; None of one stage."""
        return self.layout.pipeline(self.mesh.pipe, self.train.microbatches)

    def held_layers(self) -> dict[str, list[int]]:
        """By kind the numbers of the layers in the order in which the state holds them;
        model.layers stands for padding.
        """
        schedule = self.pipeline()
        if schedule is None:
            return pattern.held(self.model)
        depths = held_depths(schedule.stages, schedule.chunks, schedule.placement)
        return pattern.held_by_stages(self.model, depths)

    def dims(self) -> list[Dim]:
        """All sizes the mesh must divide: the model's, and those of the batches it is fed."""
        train = self.train
        dims = [
            *self.model.dims(),
            Dim("seq", train.seq_len, "train.seq_len"),
            Dim(
                "batch",
                train.batch_size // train.microbatches,
                "train.batch_size / train.microbatches",
            ),
        ]
        if group := self.model.moe.routing_group:
            groups = "train.seq_len / model.moe.routing_group"
            dims.append(Dim("seq", train.seq_len // group, groups))
        if train.eval_batch_size is not None:
            dims.append(Dim("batch", train.eval_batch_size, "train.eval_batch_size"))
        return dims
