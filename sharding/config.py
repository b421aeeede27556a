"""Config sections `mesh` and `layout`: how devices are named and what is laid over them. No JAX
here.
"""

from __future__ import annotations

from dataclasses import field
from functools import cache
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from .keys import STRICT, ReadWhen, check_read
from .pipeline.load import TableFile, load_schedule, read_schedule
from .pipeline.schedules import UNIFORM, Name, Schedule

MESH_AXES = ("replica", "pipe", "data", "fsdp", "expert", "context", "tensor")
"""Every mesh has these axes, slowest link first."""

NOT_BUILT_AXES = ("replica",)
"""Axes that exist in every mesh but whose systems are not written yet: sizes above 1 are refused.
"""

EXPERT_AXES = ("data", "fsdp", "expert", "context", "tensor")
"""Mesh axes over which experts may be shared out: those whose devices run the same layers of one
model.
"""

NOT_YET = Field(description="not built yet: 1")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MeshConfig:
    replica: Annotated[int, NOT_YET] = 1
    pipe: Annotated[
        int, Field(description="stages of layers, between which micro-batches pass by schedule")
    ] = 1
    data: Annotated[
        int,
        Field(description="devices that see different rows and hold the same; -1: what is left"),
    ] = -1
    fsdp: Annotated[
        int, Field(description="devices that see different rows and share the state by layout.zero")
    ] = 1
    expert: Annotated[
        int,
        Field(
            description="devices that see different rows and hold the same, but for experts, which "
            "they share"
        ),
    ] = 1
    context: Annotated[
        int, Field(description="devices that share each sequence, also in attention")
    ] = 1
    tensor: Annotated[
        int, Field(description="devices that share each layer's heads, hidden width and vocabulary")
    ] = 1
    dcn: Annotated[
        dict[str, int],
        Field(
            description="mesh axis -> slices (or hosts) it spans; its other devices are inside one"
        ),
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = self.sizes()
        for axis, size in sizes.items():
            if size == 0 or size < -1:
                raise ValueError(
                    f"mesh.{axis}={size}: write a positive size, or -1 for what is left"
                )
            if axis in NOT_BUILT_AXES and size != 1:
                raise ValueError(
                    f"mesh.{axis}={size}: the {axis} axis is not built yet; write mesh.{axis}=1"
                )
        if self.pipe == -1:
            raise ValueError(
                "mesh.pipe=-1: which layers a device holds is part of the model's state; write the "
                "number of stages, and -1 for another axis"
            )
        if list(sizes.values()).count(-1) > 1:
            free = " and ".join(f"mesh.{axis}" for axis, size in sizes.items() if size == -1)
            raise ValueError(f"{free} are both -1: only one axis may take what is left")
        for axis, slices in self.dcn.items():
            if axis not in MESH_AXES:
                raise ValueError(
                    f"mesh.dcn.{axis}: no such axis; the axes are {', '.join(MESH_AXES)}"
                )
            if slices < 1:
                raise ValueError(f"mesh.dcn.{axis}={slices}: write a positive number of slices")
            if sizes[axis] > 0 and sizes[axis] % slices:
                raise ValueError(
                    f"mesh.dcn.{axis}={slices} does not divide mesh.{axis}={sizes[axis]}"
                )

    def sizes(self) -> dict[str, int]:
        """Axis name -> size as written, in the order of MESH_AXES."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LayoutConfig:
    zero: Annotated[
        int,
        Field(
            ge=0,
            le=3,
            description="sharded over fsdp: 0 nothing, 1 optimizer state, 2 also gradient "
            "accumulators, 3 also parameters",
        ),
    ] = 3
    sequence_parallel: Annotated[
        bool,
        Field(description="shard activations over tensor along the sequence between matmul pairs"),
    ] = True
    overlap: Annotated[
        Literal["none", "ring", "bidirectional"],
        Field(
            description="collective matmul: activations travel over tensor in chunks, each while "
            "another is multiplied; ring, one way round; bidirectional, both ways in half the "
            "hops; not at the embedding and the output layer"
        ),
    ] = "none"
    context: Annotated[
        Literal["ring", "zigzag", "ulysses", "all_gather", "usp"],
        Field(
            description="what meets in attention over context: ring, keys and values go round; "
            "zigzag, the same with causal work balanced; all_gather, they are gathered; ulysses, "
            "tokens are exchanged for heads; usp, that among layout.ulysses neighbours, zigzag "
            "across"
        ),
    ] = "ring"
    ulysses: Annotated[
        int | None,
        Field(
            gt=0,
            description="of layout.context=usp: neighbours along context that exchange tokens for "
            "heads; null: 2",
        ),
        ReadWhen("context", ("usp",)),
    ] = None
    schedule: Annotated[
        Name,
        Field(
            description="who computes what when over pipe: gpipe, 1f1b, interleaved in lockstep, "
            "the others stage by stage; see meshwright schedule"
        ),
    ] = "1f1b"
    schedule_file: Annotated[
        TableFile | None,
        Field(
            description="a table in place of layout.schedule: a CSV file, see docs/pipeline.md, or "
            "its text, which is what a run keeps",
        ),
    ] = None
    chunks: Annotated[
        int | None,
        Field(
            gt=0,
            description="of layout.schedule=interleaved: pieces of the layers on a stage; null: 2",
        ),
        ReadWhen("schedule", ("interleaved",)),
    ] = None
    experts: Annotated[
        list[str],
        Field(
            description="mesh axes over which experts are shared out: [expert], or, folded, others "
            "of data, fsdp, context and tensor as well or instead"
        ),
    ] = field(default_factory=lambda: ["expert"])
    rules: Annotated[
        dict[str, list[str]],
        Field(description="logical axis -> mesh axes, replacing a row of sharding/rules.py"),
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        written = f"layout.experts=[{', '.join(self.experts)}]"
        if foreign := [axis for axis in self.experts if axis not in EXPERT_AXES]:
            raise ValueError(f"{written}: {foreign[0]} is not one of {', '.join(EXPERT_AXES)}")
        if len(set(self.experts)) != len(self.experts):
            raise ValueError(f"{written} names a mesh axis twice")
        if self.overlap != "none" and not self.sequence_parallel:
            raise ValueError(
                f"layout.overlap={self.overlap} needs layout.sequence_parallel=true, without which "
                f"nothing is gathered: write layout.overlap=none or layout.sequence_parallel=true"
            )
        if self.schedule_file is not None:
            for key, written, default in (
                ("schedule", self.schedule, "1f1b"),
                ("chunks", self.chunks, None),
            ):
                if written != default:
                    raise ValueError(
                        f"layout.{key}={written} is not read where layout.schedule_file has a "
                        f"table; leave one of them out"
                    )
        check_read(self, "layout")

    @property
    def lockstep(self) -> bool:
        """Whether stages are masked and not branches: then anything may run inside them."""
        return self.schedule_file is None and self.schedule in UNIFORM

    def pipeline(self, stages: int, microbatches: int) -> Schedule | None:
        """The checked table by which train.microbatches pass the stages of mesh.pipe; None of one
        stage. Raises ValueError.
        """
        if self.schedule_file is not None:
            schedule = _own_schedule(self.schedule_file)
            for what, key, given in (
                ("stages", "mesh.pipe", stages),
                ("microbatches", "train.microbatches", microbatches),
            ):
                if given != (own := getattr(schedule, what)):
                    raise ValueError(
                        f"{key}={given}, but the table of layout.schedule_file has {own} {what}: "
                        f"write {key}={own}, or layout.schedule_file=null"
                    )
            return schedule
        if stages == 1:
            return None
        chunks = (self.chunks or 2) if self.schedule == "interleaved" else None
        return _schedule(self.schedule, stages, microbatches, chunks, self.lockstep)


@cache
def _own_schedule(table: str) -> Schedule:
    schedule = read_schedule(table, "layout.schedule_file")
    if schedule.stages == 1:
        raise ValueError(
            "layout.schedule_file: a table of one stage passes nothing on; write a line for each "
            "stage of mesh.pipe, or layout.schedule_file=null"
        )
    return schedule


@cache
def _schedule(
    name: str, stages: int, microbatches: int, chunks: int | None, uniform: bool
) -> Schedule:
    try:
        return load_schedule(name, stages, microbatches, chunks, uniform)
    except ValueError as error:
        raise ValueError(
            f"layout.schedule={name} on mesh.pipe={stages} with train.microbatches={microbatches}: "
            f"{error}"
        ) from None
