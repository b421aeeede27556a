"""What a step must move, by the formulas of the papers: the bytes that one device sends, by
mechanism, mesh axes and collective. `plan` prints them beside what was compiled.

On a ring of N devices, n the bytes of the full array: all-reduce 2(N-1)/N·n; all-gather,
reduce-scatter and N-1 permutes (N-1)/N·n.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..models.config import CORE
from ..models.moe import expert_limit
from ..models.vocab import tokens_at_once
from ..sharding.exchange import exchange_rows
from ..sharding.gradients import UNREDUCED_AXES
from ..sharding.layout import Layout, entry_axes, is_param, spec_axes
from ..sharding.pipeline.orders import permutes, splits_backward
from .config import Config
from .precision import DTYPES
from .state import abstract_state

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
PERMUTE, ALL_TO_ALL = "collective-permute", "all-to-all"


@dataclass(frozen=True)
class Traffic:
    """what: the mechanism. axes: mesh axes of size > 1. sent: bytes of one device in one step."""

    what: str
    kind: str
    axes: tuple[str, ...]
    sent: float


def step_traffic(config: Config, layout: Layout) -> list[Traffic]:
    """All that a train step moves; mechanisms that send nothing in this layout are left out."""
    found = [
        *weight_traffic(config, layout),
        *activation_traffic(config, layout),
        *attention_traffic(config, layout),
        *expert_traffic(config, layout),
        *pipe_traffic(config, layout),
        *scalar_traffic(config, layout),
    ]
    return [traffic for traffic in found if traffic.sent]


def held_layers(config: Config) -> int:
    """Layers of one device, padding included."""
    return config.model.dense_layers + len(config.stacked_layers()) // config.mesh.pipe


def passes(config: Config) -> float:
    """How often each layer of a device runs in a step: for every micro-batch, and in a pipeline in
    lockstep also in the ticks of the bubble, in which what is computed is masked.
    """
    schedule = config.pipeline()
    if schedule is None or not schedule.uniform:
        return config.train.microbatches
    ticks = {tick for _, tick, op in schedule.ops() if op.kind == "F"}  # as many have a B
    return len(ticks) / schedule.chunks


def pipe_traffic(config: Config, layout: Layout) -> Iterator[Traffic]:
    """Of the residual stream over pipe, n its bytes on a device for one micro-batch: n to each
    neighbour that a schedule sends to, an activation in every tick of a loop that has an F, a
    gradient in every one that has a B; and all-reduces of n, forward and backward, of what all
    stages look up and of what all multiply by the output layer (arXiv 2411.05288).
    """
    schedule = config.pipeline()
    if schedule is None:
        return
    train = config.train
    tokens = train.batch_size // train.microbatches * train.seq_len
    n = tokens * config.model.d_model * jnp.dtype(DTYPES[config.precision.compute]).itemsize
    n //= layout.size((*layout.axes("batch"), *layout.axes("seq")))
    yield Traffic("stages", PERMUTE, ("pipe",), n * permutes(schedule))
    yield _ring("vocabulary", ALL_REDUCE, ["pipe"], 4 * n * train.microbatches, layout)


def weight_traffic(config: Config, layout: Layout) -> Iterator[Traffic]:
    """Of each parameter, P its bytes on a device before ZeRO cuts it, G micro-batches (ZeRO:
    arXiv 1910.02054, hybrid sharding: 2304.11277, data parallel: 2006.15704).

    Stage 3 gathers P twice for each product in a block, forward and backward, and once for each use
    of a vocabulary table; it reduce-scatters P once each; all of it G times. Stage 2
    reduce-scatters P G times, stage 1 once, and both gather P in f32 after the update. Once a step,
    what a device then holds is all-reduced over every axis that does not cut it.
    """
    activations = jnp.dtype(DTYPES[config.precision.compute]).itemsize
    reduce, master = jnp.dtype(layout.reduce).itemsize, 4
    params = abstract_state(config).params
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_param)
    for path, param in leaves:
        in_block = path[0].name in ("blocks", "dense_blocks")
        compute = 4 if "routes" in param.axes else activations  # routers work in f32
        uses = 2 if path[0].name == "embed" and params.unembed is None else 1
        stack = param.get_value().ndim - len(param.axes)
        at_rest, accumulator, state = (
            spec_axes(spec_of(param.axes, stack))
            for spec_of in (layout.param_spec, layout.accumulator_spec, layout.state_spec)
        )
        cut = [axis for name in param.axes for axis in layout.zero_axes(name) if axis in state]
        whole = param.get_value().size * layout.size(cut) // layout.size(state)  # elements
        gathered = [axis for axis in cut if axis in at_rest]
        scattered = [axis for axis in cut if axis in accumulator and axis not in at_rest]
        late = [axis for axis in cut if axis not in accumulator]
        missing = [axis for axis in layout.mesh.axis_names if axis not in (*state, *UNREDUCED_AXES)]
        n = whole * (passes(config) if in_block else config.train.microbatches)
        gathers = 2 if in_block else uses
        yield _ring("ZeRO-3 weights", ALL_GATHER, gathered, n * gathers * compute, layout)
        yield _ring("ZeRO-3 gradients", REDUCE_SCATTER, gathered, n * uses * reduce, layout)
        yield _ring("ZeRO-2 gradients", REDUCE_SCATTER, scattered, n * reduce, layout)
        yield _ring("ZeRO-1 gradients", REDUCE_SCATTER, late, whole * reduce, layout)
        yield _ring("updated parameters", ALL_GATHER, [*scattered, *late], whole * master, layout)
        rest = whole // layout.size(cut) * reduce
        yield _ring("gradients", ALL_REDUCE, missing, rest, layout)


def activation_traffic(config: Config, layout: Layout) -> Iterator[Traffic]:
    """Of the residual stream over tensor, n its bytes on a tensor group, L layers (Megatron:
    arXiv 1909.08053; with sequence parallelism: 2205.05198), but for experts.

    In a layer two entrances gather n forward and once more for the weights' gradients, two exits do
    so backward: 6 n; 8 n where a schedule has those gradients apart. Exits forward and entrances
    backward reduce-scatter: 4 n. The embedding adds one exit, the output layer one entrance, whose
    backward is part of the same sweep. Without sequence parallelism only exits move: all-reduces,
    forward and backward, and once more for gradients apart. Full recomputation runs attention's
    exit again; its entrances are those of the backward pass. Collective matmul (doi
    10.1145/3567955.3567959) sends the layers' part in N-1 permutes of n/N each.
    """
    model, train = config.model, config.train
    rows = train.batch_size // train.microbatches // layout.size(layout.axes("batch"))
    tokens = rows * train.seq_len // layout.size("context")
    n = tokens * model.d_model * jnp.dtype(DTYPES[config.precision.compute]).itemsize
    saved = config.remat.saved
    layers = held_layers(config) * passes(config)
    recomputed = layers / config.remat.every
    again = recomputed if saved is not None and "attention.out" not in saved else 0
    # of MLPs all, but where experts without shared ones stand in their place
    mlps = layers
    if model.experts is not None and not model.shared_experts:
        mlps = model.dense_layers * passes(config)
    schedule = config.pipeline()
    apart = schedule is not None and splits_backward(schedule)
    gathers, scatters = 3 * (layers + mlps), 2 * (layers + mlps) + again
    if apart and layout.sequence_parallel:
        gathers += layers + mlps
    elif apart:
        scatters += layers + mlps
    ends = 2 * train.microbatches
    if layout.overlap:
        yield _ring("collective matmul", PERMUTE, ["tensor"], (gathers + scatters) * n, layout)
        gathers = scatters = 0
    if layout.sequence_parallel:
        yield _ring("activations", ALL_GATHER, ["tensor"], (gathers + ends) * n, layout)
        yield _ring("activations", REDUCE_SCATTER, ["tensor"], (scatters + ends) * n, layout)
    else:
        yield _ring("activations", ALL_REDUCE, ["tensor"], (scatters + ends) * n, layout)

    # three statistics of each token's logits: maximum, sum of exponentials, target
    statistics = 4 if train.label_smoothing else 3
    axes = layout.axes("vocab")
    chunk = min(tokens_at_once(model.padded_vocab // layout.size(axes)), tokens)
    padded = math.ceil(tokens / chunk) * chunk * train.microbatches
    yield _ring("logits", ALL_REDUCE, axes, statistics * padded * 4, layout)


def attention_traffic(config: Config, layout: Layout) -> Iterator[Traffic]:
    """Of queries, keys and values over context, P devices in N groups of U, L layers.

    U neighbours exchange q, k, v and o forward and their gradients backward, k and v repeated to a
    multiple of U heads, (U-1)/U of what each holds (Ulysses: arXiv 2309.14509). Across groups, n
    the bytes of k and v that a device then holds, a ring sends (N-1) n forward, the same backward,
    and N n of their gradients, in f32 (2310.01889). Gathered, they are sent as often, but the
    gradients only (P-1) n (2407.21783). Recomputation sends what is forward again, but for a ring
    and a gather whose o and logsumexp are saved. Once a micro-batch positions and documents, two
    integers of each token, are gathered.
    """
    model, train, axes = config.model, config.train, ["context"]
    devices, neighbours = layout.size("context"), layout.resolved.ulysses
    rows = train.batch_size / train.microbatches / layout.size(layout.axes("batch"))
    rows *= passes(config)
    layers, schedule = held_layers(config), config.pipeline()
    chunks = 1 if schedule is None else schedule.chunks
    compute, saved = jnp.dtype(DTYPES[config.precision.compute]).itemsize, config.remat.saved
    recomputed = 0 if saved is None else layers // config.remat.every
    tensor = layout.size("tensor")
    heads = model.heads // tensor
    kv_heads = math.lcm((layout.resolved.kv_copies or model.num_kv_heads) // tensor, neighbours)
    head = rows * train.seq_len * model.size_per_head  # elements, all tokens
    yield _ring("places of tokens", ALL_GATHER, axes, 2 * 4 * chunks * rows * train.seq_len, layout)

    exchanged = (2 * heads + 2 * kv_heads) * head // devices * compute
    sent = exchanged * (neighbours - 1) / neighbours * (2 * layers + recomputed)
    yield Traffic("Ulysses", ALL_TO_ALL, ("context",), sent)

    held = 2 * kv_heads // neighbours * head  # elements of k and v, all groups
    forward = layers + (0 if saved and {*CORE} <= {*saved} else recomputed)
    there = held * compute * (forward + layers)
    back = held * 4 * layers
    if layout.context == "all_gather":
        yield _ring("keys and values", ALL_GATHER, axes, there, layout)
        yield _ring("their gradients", REDUCE_SCATTER, axes, back, layout)
    else:
        groups = devices // neighbours
        hops = there * (groups - 1) + (back * groups if groups > 1 else 0)
        yield Traffic("keys and values", PERMUTE, ("context",), hops / groups)


def expert_traffic(config: Config, layout: Layout) -> Iterator[Traffic]:
    """Of L layers with experts, P devices that share them out, T tokens of a device with k choices
    each, rows of h bytes.

    P·C rows go to their experts and what these make of them comes back: 2 P·C·h·(P-1)/P forward,
    and of their gradients as much backward. With a capacity C bounds what one pair of devices
    exchanges, and a recomputation sends rows again; without, this is one round, C = SLACK·T·k/P,
    and the backward pass sends rows again. A gate and an expert's number, and the gate's gradient,
    travel with a row. Where tensor cuts experts' width, tokens are gathered over it first and what
    experts make of them is reduce-scattered. The balance loss all-reduces counts.
    """
    model, train = config.model, config.train
    if model.experts is None:
        return
    axes, width = layout.axes("expert"), model.experts_per_token
    layers = held_layers(config) - model.dense_layers
    compute = jnp.dtype(DTYPES[config.precision.compute]).itemsize
    rows = train.batch_size // train.microbatches // layout.size(layout.axes("batch"))
    times = layers * passes(config)
    recomputed = 0 if config.remat.saved is None else layers // config.remat.every
    again = recomputed * passes(config)

    whole = rows * train.seq_len // layout.size("context")  # tokens of a tensor group
    small, x = 4 * whole * width, whole * model.d_model * compute
    apart, sequence = "tensor" in axes, layout.sequence_parallel
    if sequence and not apart:
        gathers = (2 * times + again) * x + 2 * (times + again) * small
        yield _ring("tokens for experts", ALL_GATHER, ["tensor"], gathers, layout)
        scatters = times * (2 * x + small)
        yield _ring("tokens for experts", REDUCE_SCATTER, ["tensor"], scatters, layout)
    elif not apart:
        yield _ring("tokens for experts", ALL_REDUCE, ["tensor"], 2 * times * x, layout)
    elif not sequence:
        yield _ring("tokens for experts", ALL_GATHER, ["tensor"], times * x, layout)
        yield _ring("tokens for experts", REDUCE_SCATTER, ["tensor"], times * x, layout)
    own = whole // layout.size("tensor") if apart else whole

    devices = layout.size(axes)
    limit = expert_limit(own, model)
    sent = devices * exchange_rows(own * width, model.experts, devices, limit)
    there = model.d_model * compute + 8
    if limit is None:
        row = times * (2 * there + 3 * model.d_model * compute + 4)
        yield _ring("rounds", ALL_REDUCE, axes, 2 * 4 * times, layout)
    else:
        row = times * (there + 3 * model.d_model * compute + 4) + again * there
    yield _ring("experts' tokens", ALL_TO_ALL, axes, sent * row, layout)

    counted = 4 * model.experts * (times + again) * bool(model.balance_loss)
    if model.balance == "microbatch":
        everywhere = [*layout.axes("batch"), *layout.axes("seq")]
        yield _ring("balance", ALL_REDUCE, everywhere, counted, layout)
    else:
        n = rows * train.seq_len * counted
        yield _ring("balance", ALL_REDUCE, layout.axes("seq"), n, layout)


def scalar_traffic(config: Config, layout: Layout) -> Iterator[Traffic]:
    """Four bytes each: the number of targets, logged sums, each leaf's part of the global norm over
    the axes of each dim in turn.
    """
    train, names = config.train, layout.mesh.axis_names
    everywhere = [axis for axis in names if axis not in UNREDUCED_AXES]
    yield _ring("metrics", ALL_REDUCE, [*layout.axes("batch"), "context"], 4, layout)
    sums = 1 + bool(train.z_loss) + bool(train.label_smoothing)
    if (model := config.model).experts is not None:
        yield _ring("metrics", ALL_REDUCE, [*layout.axes("batch"), "context"], 4, layout)
        layers = model.layers - model.dense_layers
        sums += layers * (model.experts + (model.capacity is not None)) + 1
        sums += bool(model.balance_loss) + bool(model.router_z_loss)
    yield _ring("metrics", ALL_REDUCE, everywhere, 4 * sums, layout)
    params = abstract_state(config).params
    leaves = jax.tree.leaves(params, is_leaf=is_param)
    if train.halt_on_nan:
        yield _ring("metrics", ALL_REDUCE, everywhere, 4 * train.microbatches * len(leaves), layout)
    for param in leaves:
        stack = param.get_value().ndim - len(param.axes)
        for entry in layout.state_spec(param.axes, stack):
            yield _ring("global norm", ALL_REDUCE, entry_axes(entry), 4, layout)


def _ring(what: str, kind: str, axes: Sequence[str], n: float, layout: Layout) -> Traffic:
    """What one device sends of n bytes."""
    wide = tuple(axis for axis in layout.mesh.axis_names if axis in axes and layout.size(axis) > 1)
    devices = layout.size(wide)
    factor: Any = 2 if kind == ALL_REDUCE else 1
    return Traffic(what, kind, wide, factor * (devices - 1) / devices * n)
