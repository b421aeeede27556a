"""Logical axes -> mesh axes: the table, and what a given model and mesh make of it. No JAX here.

A parameter or activation names its dims by logical axis; this table says which mesh axes cut each
of them. `resolve` applies it to real sizes once, so that every later lookup is a plain one without
a shape in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .config import MESH_AXES, LayoutConfig, MeshConfig

ZERO_AXES = ("data", "fsdp", "expert")
"""Mesh axes whose devices see different rows: the batch is cut over them, and ZeRO may cut state
over them.
"""

RULES: dict[str, tuple[str, ...]] = {
    # dims of parameters
    "layers": ("pipe",),  # the stack of blocks, in the order in which stages hold them
    "vocab": ("pipe", "tensor"),  # embedding and head are shared by all stages (2411.05288)
    "embed": ("fsdp",),  # d_model as a dim of a matrix: the dim ZeRO cuts
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "latent": ("fsdp",),  # a rank as the dim that the next matrix multiplies: ZeRO cuts it
    "latent_channel": (),  # the same as a product or a vector
    "mlp": ("tensor",),
    "expert": ("expert",),  # layout.experts
    "expert_embed": ("fsdp",),  # embed, without the axes of expert
    "expert_mlp": ("tensor",),  # mlp, without the axes of expert
    "routes": (),  # the experts as the router's outputs
    "channel": (),  # d_model as a vector (norm scales, output biases): too small to cut
    # dims of activations
    "batch": ZERO_AXES,
    # between matmul pairs; inside them the sequence is gathered over tensor
    "seq": ("context", "tensor"),
}


@dataclass(frozen=True)
class Dim:
    """A logical axis, a size it has in this model or batch, and the config key that sets it."""

    axis: str
    size: int
    key: str


@dataclass(frozen=True)
class Resolved:
    """The table for one model on one mesh."""

    rules: tuple[tuple[str, tuple[str, ...]], ...]
    """(logical axis, mesh axes) pairs"""
    kv_copies: int
    """heads that kv heads are repeated to where tensor does not divide them, so that each tensor
    shard gets whole ones"""
    ulysses: int
    """neighbours along context that exchange tokens for heads"""
    chunks: int
    """pieces of each row that are dealt out along context in zigzag; 1: it is cut as it stands"""
    notes: tuple[str, ...]
    """lines for the start-up summary about what stayed replicated"""


def mesh_sizes(config: MeshConfig, devices: int) -> dict[str, int]:
    """Axis -> size with -1 filled in. Raises ValueError when the sizes do not multiply to
    `devices`.
    """
    sizes = config.sizes()
    known = math.prod(size for size in sizes.values() if size > 0)
    written = (
        " · ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size != 1)
        or "all of size 1"
    )
    free = [axis for axis, size in sizes.items() if size == -1]
    if free:
        if devices % known:
            enough = -(-devices // known) * known
            raise ValueError(
                f"mesh: {written} needs a multiple of {known} devices, but there are {devices}; "
                f"{without_devices(enough)}"
            )
        sizes[free[0]] = devices // known
    elif known != devices:
        more = f"; {without_devices(known)}" if known > devices else ""
        raise ValueError(
            f"mesh: {written} needs {known} devices, but there are {devices}; "
            f"one axis may be -1 and takes what is left{more}"
        )
    return sizes


def without_devices(count: int) -> str:
    """What to do where there are fewer, for a message."""
    return (
        f"device.cpu_devices={count} simulates {count} in one process, and meshwright plan with "
        f"--target needs none"
    )


def resolve(
    layout: LayoutConfig,
    sizes: Mapping[str, int],
    dims: Sequence[Dim],
    branches: str | None = None,
) -> Resolved:
    """Check the table against `dims` and the mesh's `sizes`, and settle what the mesh cannot cut.
    branches: what makes stages run in branches, beside the schedule, as a message begins.

    Raises ValueError with the config keys and both numbers when a dim does not divide. Two things
    give way instead: a dim that ZeRO would cut is replicated when it does not divide, and kv heads
    that tensor does not divide are repeated.
    """
    rules = RULES | {name: _override(name, axes) for name, axes in layout.rules.items()}
    if not layout.sequence_parallel:
        rules["seq"] = ("context",)
    rules["expert"] = tuple(layout.experts)
    for name in ("embed", "mlp"):
        rest = tuple(axis for axis in rules[name] if axis not in layout.experts)
        rules[f"expert_{name}"] = rest
    ulysses, chunks = _context(layout, sizes)
    if not layout.lockstep:
        branches = f"layout.schedule={layout.schedule} runs"
        if layout.schedule_file is not None:
            branches = "layout.schedule_file: a table of one's own runs"
    if sizes["pipe"] > 1 and branches is not None:
        _refuse_permutes(layout, sizes, ulysses, branches)
    notes, kv_copies = [], 0
    for dim in dims:
        shards = math.prod(sizes[axis] for axis in rules[dim.axis])
        if dim.size % shards == 0:
            continue
        over = " · ".join(
            f"mesh.{axis}={sizes[axis]}" for axis in rules[dim.axis] if sizes[axis] > 1
        )
        if dim.axis == "kv_heads":
            kv_copies = math.lcm(dim.size, shards)
            rules[dim.axis] = ()
            notes.append(
                f"{dim.key}={dim.size} on {over}: kv weights are replicated over tensor, "
                f"kv heads repeated to {kv_copies}"
            )
        elif dim.axis in ("embed", "expert_embed", "latent"):
            rules[dim.axis] = ()
            notes.append(f"{dim.key}={dim.size} is not a multiple of {over}: replicated instead")
        else:
            raise ValueError(f"{dim.key}={dim.size} is not a multiple of {over}")
    mode = f"layout.context={layout.context} on mesh.context={sizes['context']}"
    for dim in dims:
        heads = dim.size // sizes["tensor"]
        if dim.axis == "heads" and heads % ulysses:
            raise ValueError(
                f"{dim.key}={dim.size} on mesh.tensor={sizes['tensor']} leaves {heads} heads, not "
                f"a multiple of the {ulysses} devices among which {mode} exchanges them; write "
                f"layout.context=zigzag"
            )
        if dim.axis == "seq" and dim.size % chunks:
            raise ValueError(
                f"{dim.key}={dim.size} is not a multiple of the {chunks} chunks that {mode} deals "
                f"out; write layout.context=ring"
            )
    return Resolved(tuple(rules.items()), kv_copies, ulysses, chunks, tuple(notes))


def _context(layout: LayoutConfig, sizes: Mapping[str, int]) -> tuple[int, int]:
    """`ulysses` and `chunks` of a layout: see `Resolved`."""
    devices = sizes["context"]
    if devices == 1 or layout.context == "ring":
        return 1, 1
    if layout.context == "ulysses":
        return devices, 1
    if layout.context != "usp":
        return 1, 2 * devices
    neighbours = layout.ulysses or 2
    if devices % neighbours:
        raise ValueError(f"layout.ulysses={neighbours} does not divide mesh.context={devices}")
    groups = devices // neighbours
    return neighbours, 2 * groups if groups > 1 else 1


def _refuse_permutes(
    layout: LayoutConfig, sizes: Mapping[str, int], ulysses: int, written: str
) -> None:
    """Raises ValueError where stages that are branches would send by permutes: CPU's wait for all
    devices, those in other branches too. written: what runs stages so.
    """
    other = ""
    if not layout.lockstep:
        key = "schedule_file=null" if layout.schedule_file else "schedule=1f1b or interleaved"
        other = f", or layout.{key}"
    branches = f"{written} stages in branches, where no permute may run, since all devices take"
    if layout.context != "all_gather" and sizes["context"] > ulysses:
        raise ValueError(
            f"{branches} part in it: layout.context={layout.context} on "
            f"mesh.context={sizes['context']} sends by permutes; write layout.context=all_gather "
            f"or ulysses{other}"
        )
    if layout.overlap != "none" and sizes["tensor"] > 1:
        raise ValueError(
            f"{branches} part in it: layout.overlap={layout.overlap} on "
            f"mesh.tensor={sizes['tensor']} sends by permutes; write layout.overlap=none{other}"
        )


def _override(name: str, axes: list[str]) -> tuple[str, ...]:
    """A row from `layout.rules`. Only the dim that ZeRO cuts may move; the others are part of the
    algorithms.
    """
    if name not in RULES:
        raise ValueError(
            f"layout.rules.{name}: no such logical axis; the rows are {', '.join(RULES)}"
        )
    for axis in axes:
        if axis not in MESH_AXES:
            raise ValueError(
                f"layout.rules.{name}: {axis} is no mesh axis; the axes are {', '.join(MESH_AXES)}"
            )
    if len(set(axes)) != len(axes):
        raise ValueError(f"layout.rules.{name}=[{', '.join(axes)}] names a mesh axis twice")
    if tuple(axes) == RULES[name]:
        return RULES[name]
    if name != "embed":
        raise ValueError(
            f"layout.rules.{name}: only the row embed may be changed; "
            f"{name} stays on [{', '.join(RULES[name])}]"
        )
    if foreign := [axis for axis in axes if axis not in ZERO_AXES]:
        raise ValueError(f"layout.rules.embed: {foreign[0]} is not one of {', '.join(ZERO_AXES)}")
    return tuple(axes)
