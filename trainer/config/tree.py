"""The config tree: every section in one frozen, typed value. No JAX here; see also `load.py`."""

from __future__ import annotations

import math
import os
from dataclasses import field

from pydantic.dataclasses import dataclass

from ...models import pattern
from ...models.config import ModelConfig, RematConfig
from ...sharding.config import LayoutConfig, MeshConfig
from ...sharding.keys import STRICT
from ...sharding.pipeline.schedules import Schedule, held_depths
from ...sharding.rules import Dim, mesh_sizes, resolve
from .checkpoint import CheckpointConfig
from .data import SMALLEST_VOCABULARY, DataConfig
from .device import DeviceConfig, LogConfig
from .launch import LaunchConfig, find_scheduler
from .optimizer import GroupConfig, OptimizerConfig
from .precision import PrecisionConfig
from .run import AUTO, RunConfig, TrainConfig


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
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self) -> None:
        """What sections must agree on; what needs the real devices is checked when JAX is up."""
        train, optimizer, data = self.train, self.optimizer, self.data
        if self.run.name == AUTO and self.checkpoint.resume != "never":
            raise ValueError(
                f"run.name={AUTO} begins a new run each time, which checkpoint.resume="
                f"{self.checkpoint.resume} cannot go on with; write the name of the run"
            )
        stated = self.stated_devices()
        devices = math.prod(stated.values()) if stated else None
        if devices is None and -1 not in self.mesh.sizes().values():
            devices = math.prod(self.mesh.sizes().values())
        if devices is not None:
            try:
                sizes = mesh_sizes(self.mesh, devices)
            except ValueError as error:
                source = " · ".join(f"{key}={count}" for key, count in stated.items())
                raise ValueError(f"{source}: {error}") from None
            resolve(self.layout, sizes, self.dims(), self.why_branches())
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
        latent = "attention.latent" in (self.remat.names or ())
        if latent and "mla" not in self.model.kinds[0]:
            raise ValueError(
                f"remat.names: attention.latent is of no layer with model.mixer="
                f"{self.model.mixer}; leave it out"
            )
        if (group := moe.routing_group) and train.seq_len % group:
            raise ValueError(
                f"train.seq_len={train.seq_len} is not a multiple of "
                f"model.moe.routing_group={group}"
            )
        warmup = optimizer.warmup_updates(train.tokens_per_update)
        if warmup >= 2**31:
            raise ValueError(
                f"optimizer.warmup={optimizer.warmup} are {warmup} updates; write fewer than "
                f"2147483648 of them"
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
        for segment in pattern.segments([slot.options for slot in self.chunk_slots()]):
            if segment.repeats % self.remat.every:
                alike = f"has {segment.repeats} repeat(s) of {segment.period} layer(s) in a row"
                raise ValueError(
                    f"{written} {alike}, not a multiple of remat.every={self.remat.every}"
                )
        cooldown = optimizer.cooldown_updates(train.steps)
        if optimizer.schedule == "wsd" and warmup + cooldown > train.steps:
            written = f"optimizer.warmup={optimizer.warmup}"
            if written != f"optimizer.warmup={warmup}":
                written += f", {warmup} updates,"
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

    def stated_devices(self) -> dict[str, int]:
        """Config keys whose product is the number of devices over all processes; none: unknown, as
        where a scheduler decides how many processes simulate device.cpu_devices each.
        """
        device, processes = self.device, self.launch.process_count
        if device.count is not None:
            return {"device.count": device.count}
        scheduled = processes is None and find_scheduler(os.environ, on_tpu=False) is not None
        if device.cpu_devices is None or scheduled:
            return {}
        stated = {"device.cpu_devices": device.cpu_devices}
        return stated if processes in (None, 1) else stated | {"launch.process_count": processes}

    def pipeline(self) -> Schedule | None:
        """The checked table by which micro-batches pass the stages; None of one stage."""
        return self.layout.pipeline(self.mesh.pipe, self.train.microbatches)

    def first_depths(self) -> list[int]:
        """Depths of the chunks of layers that the first stage holds."""
        schedule = self.pipeline()
        return self.chunk_depths()[: 1 if schedule is None else schedule.chunks]

    def chunk_depths(self) -> list[int]:
        """Depths in the model of all chunks of layers, in the order in which stages hold them."""
        schedule = self.pipeline()
        if schedule is None:
            return [0]
        return held_depths(schedule.stages, schedule.chunks, schedule.placement)

    def chunk_slots(self) -> tuple[pattern.Slot, ...]:
        """The places for layers of a chunk."""
        return pattern.slots(pattern.layers(self.model), len(self.chunk_depths()))

    def held_layers(self) -> dict[str, list[int]]:
        """By kind the numbers of the layers in the order in which the state holds them;
        model.layers stands for padding.
        """
        return pattern.held_by_stages(self.model, self.chunk_depths())

    def why_branches(self) -> str | None:
        """What makes stages of a pipeline run in branches, beside its schedule; None: nothing."""
        if all(len(slot.options) == 1 for slot in self.chunk_slots()):
            return None
        return (
            f"model.layers={self.model.layers} on mesh.pipe={self.mesh.pipe}, "
            f"{len(self.chunk_depths())} pieces in all, has stages whose layers differ: they run"
        )

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
