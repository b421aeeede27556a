"""The systems map of a step, read off the compiled program: what each device holds, what it sends
over which mesh axis beside what the formulas say, and whether it fits.
"""

from __future__ import annotations

import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ...sharding.layout import Layout, is_param, spec_axes
from ...sharding.rules import RULES
from ..config import Config
from ..log.tables import in_columns
from ..state import abstract_state, lay_out
from ..step import make_train_step, step_shapes
from .hlo import Collective, read_program
from .topology import device_memory
from .traffic import step_traffic


@dataclass(frozen=True)
class Held:
    """Bytes that one device holds of the parameters of a role, of their optimizer state, or of the
    sums of their gradients.
    """

    what: str
    """which of the three"""
    role: str
    replicated: int
    """bytes that every device holds alike"""
    sharded: int
    """this device's part of the rest"""
    axes: tuple[str, ...]
    """mesh axes that cut the rest"""
    formula: int
    """bytes by ZeRO's table (arXiv 1910.02054), with tensor parallelism"""


@dataclass(frozen=True)
class Moved:
    """What one device sends in a step by one kind of collective over the same mesh axes."""

    axes: tuple[str, ...] | None
    """None: the devices that take part are no axes of the mesh"""
    kind: str
    """as in `all-reduce`"""
    dtypes: tuple[str, ...]
    times: int
    """how often it runs"""
    at_least: bool
    """whether it stands in a loop whose length follows from data, which is counted as one round"""
    sent: int
    """bytes, by the compiled program"""
    exposed: int
    """bytes of it that do not travel while something is computed"""
    formula: int
    """bytes, by `traffic.py`"""
    why: tuple[str, ...]
    """the mechanisms in that formula"""


@dataclass(frozen=True)
class Memory:
    """Bytes of one device."""

    arguments: int
    """state and batch; the new state takes the old one's place"""
    temporaries: int
    limit: int | None
    """what the device has; None: not known, or the host's"""
    fits: bool | None
    """None where the limit is"""


@dataclass(frozen=True)
class Plan:
    """Where every byte of a compiled step lies, and what moves."""

    name: str
    """of the run"""
    mesh: dict[str, int]
    """sizes of its axes, those of one device left out"""
    device: str
    """the kind of device that it is compiled for"""
    zero: int
    """layout.zero"""
    held: tuple[Held, ...]
    moved: tuple[Moved, ...]
    unexplained: int
    """bytes sent beyond the formulas"""
    unknown: tuple[str, ...]
    """lines of the program that look like communication and were not understood"""
    memory: Memory


class DoesNotFitError(RuntimeError):
    """The compiler says that the step needs more memory than a device has."""


def make_plan(config: Config, devices: Sequence[Any]) -> Plan:
    """Compile the config's train step for `devices`, which may be those of a topology nobody has
    here, and read it. Raises DoesNotFitError where the compiler refuses for lack of memory.
    """
    layout = lay_out(config, devices)
    say_compiling("the step", list(layout.mesh.devices.flat))
    lowered, compiled = compile_step(config, layout)
    # CPU sends bf16 as f32, in place of devices that would not
    asked = lowered.as_text(debug_info=True) if devices[0].platform == "cpu" else None
    program = read_program(compiled.as_text() or "", layout.mesh.shape, asked)
    moved = tuple(movements(program.collectives, config, layout))
    analysis: Any = compiled.memory_analysis()
    arguments, temporaries = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    limit = device_memory(devices[0])
    return Plan(
        name=config.run.name,
        mesh={axis: size for axis, size in layout.mesh.shape.items() if size > 1},
        device=devices[0].device_kind,
        zero=layout.config.zero,
        held=tuple(holdings(config, layout)),
        moved=moved,
        unexplained=sum(max(0, row.sent - row.formula) for row in moved),
        unknown=program.unknown,
        memory=Memory(
            arguments,
            temporaries,
            limit,
            None if limit is None else arguments + temporaries <= limit,
        ),
    )


def say_compiling(what: str, devices: Sequence[Any]) -> None:
    """A line on stderr: a compiler is silent for minutes, and stdout is for what was asked for."""
    many = f"{len(devices)} × {devices[0].device_kind}"
    print(f"meshwright: compiling {what} for {many}", file=sys.stderr, flush=True)


def compile_step(config: Config, layout: Layout, options: Any = None) -> tuple[Any, Any]:
    """The train step, lowered and compiled. Raises DoesNotFitError where the compiler refuses for
    lack of memory.
    """
    lowered = make_train_step(config, layout).lower(*step_shapes(config, layout))
    try:
        return lowered, lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        line, *_ = str(error).splitlines()
        told = re.search(r"(?i)\S*Used \S+ of \S+ hbm.*|HLO temporaries \(.*", line)
        reason = told[0] if told else line
        kind = layout.mesh.devices.flat[0].device_kind
        raise DoesNotFitError(f"the step does not fit a {kind}: {reason}") from None


def holdings(config: Config, layout: Layout) -> Iterator[Held]:
    """What a device holds at rest, and of gradients while a step runs, by the parameters' role."""
    state = abstract_state(config)
    zero_axes = config.layout.rules.get("embed", RULES["embed"])
    for what, tree, spec_of, stage in (
        ("parameters", state.params, layout.param_spec, 3),
        ("optimizer state", (state.opt, state.average), layout.state_spec, 1),
        ("gradient sums", state.params, layout.accumulator_spec, 2),
    ):
        shards = layout.size(zero_axes) if layout.config.zero >= stage else 1
        rows: dict[str, list[tuple[int, tuple[str, ...], float]]] = defaultdict(list)
        for param in filter(is_param, jax.tree.leaves(tree, is_leaf=is_param)):
            for leaf in jax.tree.leaves(param):
                axes = spec_axes(spec_of(param.axes, leaf.ndim - len(param.axes)))
                size = math.prod(leaf.shape) * leaf.dtype.itemsize
                split = [axis for axis in axes if axis not in zero_axes]
                formula = size / layout.size(split) / shards
                rows[param.role].append((size // layout.size(axes), axes, formula))
        for role, held in rows.items():
            cut = {axis for _, axes, _ in held for axis in axes if layout.size(axis) > 1}
            whole = sum(size for size, axes, _ in held if layout.size(axes) == 1)
            yield Held(
                what=what,
                role=role,
                replicated=whole,
                sharded=sum(size for size, _, _ in held) - whole,
                axes=tuple(axis for axis in layout.mesh.axis_names if axis in cut),
                formula=math.ceil(sum(formula for _, _, formula in held)),
            )


def movements(collectives: Sequence[Collective], config: Config, layout: Layout) -> Iterator[Moved]:
    """One row for each kind of collective over the same mesh axes, compiled or expected."""
    expected = step_traffic(config, layout)
    keys = dict.fromkeys(
        [(traffic.axes, traffic.kind) for traffic in expected]
        + [(found.axes, found.kind) for found in collectives]
    )
    for axes, kind in sorted(keys, key=lambda key: (str(key[0]), key[1])):
        found = [each for each in collectives if (each.axes, each.kind) == (axes, kind)]
        known = [each for each in expected if (each.axes, each.kind) == (axes, kind)]
        yield Moved(
            axes=axes,
            kind=kind,
            dtypes=tuple(sorted({dtype for each in found for dtype in each.dtype.split("+")})),
            times=sum(each.times for each in found),
            at_least=any(each.at_least for each in found),
            sent=sum(each.sent * each.times for each in found),
            exposed=sum(each.sent * each.times for each in found if not each.overlapped),
            formula=round(sum(each.sent for each in known)),
            why=tuple(dict.fromkeys(each.what for each in known)),
        )


def describe_plan(plan: Plan) -> Iterator[str]:
    """The map as lines of text."""
    mesh = " · ".join(f"{axis}={size}" for axis, size in plan.mesh.items()) or "one device"
    devices = math.prod(plan.mesh.values())
    yield f"{plan.name}: {mesh}, zero {plan.zero}, on {devices} × {plan.device}"
    yield ""
    held_rows = [["bytes held by a device", "replicated", "sharded", "formula", "over"]]
    for held in plan.held:
        figures = [f"{size:,}" for size in (held.replicated, held.sharded, held.formula)]
        held_rows.append([f"{held.what}, {held.role}", *figures, " · ".join(held.axes)])
    yield from in_columns(held_rows, figures=3)
    yield ""
    rows = [["bytes sent by a device in a step", "times", "sent", "formula", "exposed", "for"]]
    for moved in plan.moved:
        axes = "no axes of the mesh" if moved.axes is None else " · ".join(moved.axes)
        name = f"{axes}: {moved.kind} {' '.join(moved.dtypes)}"
        times = f"{'≥' * moved.at_least}{moved.times:,}"
        figures = [f"{size:,}" for size in (moved.sent, moved.formula, moved.exposed)]
        rows.append([name, times, *figures, ", ".join(moved.why)])
    rows.append(["unexplained", "", f"{plan.unexplained:,}", "", "", ""])
    yield from in_columns(rows, figures=4)
    if any(moved.at_least for moved in plan.moved):
        yield "≥: in loops whose length follows from data, each counted as one round"
    for line in plan.unknown:
        yield f"not understood: {line}"
    yield ""
    memory = plan.memory
    total = memory.arguments + memory.temporaries
    yield (
        f"memory of a device: {memory.arguments:,} bytes of arguments + {memory.temporaries:,} "
        f"temporary = {total:,}"
    )
    if memory.limit is None:
        yield f"what a {plan.device} has is this machine's own, or not known"
    elif memory.fits:
        yield f"fits in {memory.limit:,}: {1 - total / memory.limit:.0%} is left"
    else:
        yield f"does not fit in {memory.limit:,}: {total - memory.limit:,} too many"
