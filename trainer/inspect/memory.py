"""What the policies of recomputation save and cost: bytes by name and FLOPs read off the traced
program, temporary bytes off the compiled one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.sharding import PartitionSpec as P

from ...models.batch import Batch
from ...models.config import RematConfig, Saved
from ...models.dropout import row_keys
from ...models.pattern import segments
from ...models.transformer import Layers, Transformer, split
from ...sharding.layout import Layout, specs
from ..assembly import Piece, make_stages, training_loss
from ..config import Config
from ..log.tables import in_columns
from ..state import abstract_state, lay_out
from ..step import step_shapes
from .plan import DoesNotFitError, compile_step, say_compiling

POLICIES = ("none", "full", "selective", "offload")
UNNAMED, BLOCK_INPUT = "without a name", "block.input"


class Cost(NamedTuple):
    """Of one device and one micro-batch, over the layers of a chunk."""

    saved: Counter[str]
    """bytes kept for the backward pass, by name"""
    on_host: int
    """how many of them are offloaded"""
    flops: int
    """of all matrix products, forward and backward, those of hidden pairs of attention blocks too;
    of experts one round, with every row that there is room for
    """


def memory_table(config: Config, devices: Sequence[Any]) -> str:
    """A table with a column for each policy; the config's own has its remat.names and remat.every.

    Compiles the step once for each.
    """
    layout = lay_out(config, devices)
    say_compiling(
        f"the step {len(POLICIES)} times, once for each policy,", list(layout.mesh.devices.flat)
    )
    layers = len(config.chunk_slots())
    configs = [
        config if config.remat.policy == name else replace(config, remat=RematConfig(policy=name))
        for name in POLICIES
    ]
    costs = [block_costs(config, layout) for config in configs]

    def temporaries(config: Config) -> str:
        try:
            return f"{temporary_bytes(config, layout):,}"
        except DoesNotFitError:
            return "does not fit"

    named = [*get_args(Saved), *(name for cost in costs for name in cost.saved)]
    names = [*dict.fromkeys(name for name in named if name != UNNAMED), UNNAMED]
    rows: dict[str, list[float]] = {
        name: [cost.saved[name] / layers for cost in costs] for name in names
    }
    rows |= {
        "saved, per layer": [cost.saved.total() / layers for cost in costs],
        "of it on the host": [cost.on_host / layers for cost in costs],
        "FLOPs again, per layer": [(cost.flops - costs[0].flops) / layers for cost in costs],
    }
    cells = {name: [f"{round(value):,}" for value in values] for name, values in rows.items()}
    cells["temporary, the step"] = [temporaries(config) for config in configs]
    mesh = " · ".join(f"{axis}={size}" for axis, size in layout.mesh.shape.items() if size > 1)
    own = ", ".join(f"{key}={value}" for key, value in vars(config.remat).items() if value)
    return "\n".join(
        [
            f"bytes per device of {mesh or 'one device'}, one of {config.train.microbatches} "
            f"micro-batch(es); remat {own}",
            *in_columns(
                [["", *POLICIES], *([name, *row] for name, row in cells.items())],
                figures=len(POLICIES),
            ),
        ]
    )


def block_costs(config: Config, layout: Layout) -> Cost:
    """What the layers of a chunk cost, traced with the shapes that a device sees."""
    params, schedule = abstract_state(config).params, config.pipeline()
    chunks = 1 if schedule is None else schedule.chunks
    traced: list[ClosedJaxpr] = []

    def trace(params: Transformer, batch: Batch) -> None:
        batch = jax.tree.map(lambda a: a[0], batch)
        rows = row_keys(config.run.seed, jnp.zeros((len(batch.tokens), 2), jnp.uint32))
        piece = Piece(batch, rows if config.train.dropout else None)
        stages = make_stages(config, layout, training_loss(config))
        ends, layers = split(params)
        layers = jax.tree.map(lambda a: a[: len(a) // chunks], layers)
        x = jax.eval_shape(lambda: stages.embed(ends, piece))

        def forward_and_backward(layers: Layers, x: jax.Array) -> Any:
            def forward(layers: Layers, x: jax.Array) -> jax.Array:
                return stages.layers(layers, x, piece, 0)[0][0]

            x, backward = jax.vjp(forward, layers, x)
            return backward(x)

        traced.append(jax.make_jaxpr(forward_and_backward)(layers, x))

    in_specs = specs(params, layout.param_spec), layout.batch_spec()
    jax.eval_shape(
        jax.shard_map(trace, mesh=layout.mesh, in_specs=in_specs, out_specs=P(), check_vma=False),
        params,
        step_shapes(config, layout)[1],
    )
    jaxpr = traced[0].jaxpr
    scans = segments([slot.options for slot in config.chunk_slots()])
    saved, on_host = saved_bytes(jaxpr, count=len(scans))
    return Cost(saved, on_host, matrix_flops(jaxpr))


def temporary_bytes(config: Config, layout: Layout) -> int:
    """Of the compiled train step on one device; on CPU that counts host memory in. Raises
    DoesNotFitError.
    """
    # optimising machine code changes no buffer
    _, compiled = compile_step(config, layout, {"xla_backend_optimization_level": 0})
    return compiled.memory_analysis().temp_size_in_bytes


def saved_bytes(jaxpr: Jaxpr, count: int) -> tuple[Counter[str], int]:
    """Bytes by name, and how many of them on the host, that the first `count` scans of `jaxpr`,
    those over layers, stack up.
    """
    saved, on_host, read = Counter(), 0, used_variables(jaxpr)
    for scan in [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"][:count]:
        (body,) = inner_programs(scan)
        for index, stack in enumerate(scan.outvars):
            if stack in read and not is_carried(scan, index):
                aval: Any = stack.aval
                size = math.prod(aval.shape) * aval.dtype.itemsize
                name, offloaded = origin(body, body.outvars[index])
                saved[name] += size
                on_host += size if offloaded else 0
    return saved, on_host


def used_variables(jaxpr: Jaxpr) -> set[Any]:
    """Those that anything follows from which `jaxpr` returns; sums to log are not among them."""
    used = {var for var in jaxpr.outvars if isinstance(var, Var)}
    for eqn in reversed(jaxpr.eqns):
        if not used.isdisjoint(eqn.outvars):
            used |= {var for var in eqn.invars if isinstance(var, Var)}
    return used


def is_carried(scan: JaxprEqn, index: int) -> bool:
    """Whether result `index` of a scan is what it carries; the others are stacks of its body's."""
    (body,) = inner_programs(scan)
    one: Any = body.outvars[index].aval
    result: Any = scan.outvars[index].aval
    return one.shape == result.shape


def origin(program: Jaxpr, var: Any) -> tuple[str, bool]:
    """The name of what a layer saves, and whether it was moved to the host."""
    eqn = next((eqn for eqn in program.eqns if var in eqn.outvars), None)
    if eqn is None:
        return BLOCK_INPUT, False
    index, kind = eqn.outvars.index(var), eqn.primitive.name
    if kind == "name":
        return eqn.params["name"], False
    if kind in ("device_put", "reduce_precision"):  # how JAX saves, to the host and at all
        name, offloaded = origin(program, eqn.invars[index])
        return name, offloaded or kind == "device_put"
    if kind == "scan" and is_carried(eqn, index):  # from the first layers of a group to its last
        return BLOCK_INPUT, False
    inner = inner_programs(eqn)
    if len(inner) != 1:
        return UNNAMED, False
    (body,), result = inner, inner[0].outvars[index]
    if kind != "scan" and result in body.invars:  # handed through
        return origin(program, eqn.invars[body.invars.index(result)])
    return origin(body, result)


def matrix_flops(program: Jaxpr) -> int:
    """2 FLOPs for each multiplication and addition of every matrix product that `program` runs; of
    the branches of a condition, the dearest; of a choice by platform, that of no named one; of a
    loop whose length follows from data, one round.
    """
    total = 0
    for eqn in program.eqns:
        inner = [matrix_flops(body) for body in inner_programs(eqn)]
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left: Any = eqn.invars[0].aval
            out: Any = eqn.outvars[0].aval
            total += 2 * math.prod(out.shape) * math.prod(left.shape[dim] for dim in contracted)
        elif eqn.primitive.name == "ragged_dot_general":  # rows times one of many matrices each
            rows: Any = eqn.invars[0].aval
            product: Any = eqn.outvars[0].aval
            total += 2 * math.prod(rows.shape) * product.shape[-1]
        elif eqn.primitive.name == "cond":
            total += inner[-1] if eqn.params.get("branches_platforms") else max(inner)
        else:
            total += sum(inner) * eqn.params.get("length", 1)
    return total


def inner_programs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Bodies and branches of one instruction."""
    params = jax.tree.leaves(eqn.params, is_leaf=lambda a: isinstance(a, ClosedJaxpr | Jaxpr))
    return [
        a.jaxpr if isinstance(a, ClosedJaxpr) else a
        for a in params
        if isinstance(a, ClosedJaxpr | Jaxpr)
    ]
