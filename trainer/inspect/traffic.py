"""What a step must move, by the formulas of the papers: the bytes that one device sends, by
mechanism, mesh axes and collective. `plan` prints them beside what was compiled. Those of a
mechanism stand beside it; here they are added up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp

from ...models.layers.kinds import adds_loss, layer_sent, measured
from ...models.pattern import Layer
from ...models.vocab import tokens_at_once
from ...sharding.gradients import reduced_axes
from ...sharding.layout import Layout, is_param, spec_axes
from ...sharding.pipeline.orders import permutes, splits_backward
from ...sharding.traffic import (
    ALL_GATHER,
    ALL_REDUCE,
    PERMUTE,
    REDUCE_SCATTER,
    LayerRuns,
    Traffic,
    ring,
)
from ..config import Config
from ..optim.optimizer import optimizer_sent
from ..optim.precision import DTYPES
from ..state import abstract_state


def step_traffic(config: Config, layout: Layout) -> list[Traffic]:
    """All that a train step moves; mechanisms that send nothing in this layout are left out."""
    found = [
        *weight_traffic(config, layout),
        *layer_traffic(config, layout),
        *ends_traffic(config, layout),
        *pipe_traffic(config, layout),
        *optimizer_traffic(config, layout),
        *scalar_traffic(config, layout),
    ]
    return [traffic for traffic in found if traffic.sent]


def layer_runs(config: Config, layout: Layout) -> Iterator[tuple[Layer, LayerRuns]]:
    """Each layer of a device, and how often it runs in a step. Where stages differ, the first one's
    layers; those are recomputed under any policy.
    """
    train, saved = config.train, config.remat.saved
    schedule, times = config.pipeline(), passes(config)
    again = 0 if saved is None else times / config.remat.every
    runs = LayerRuns(
        rows=train.batch_size // train.microbatches // layout.size(layout.axes("batch")),
        seq_len=train.seq_len,
        passes=times,
        again=again,
        saved=frozenset(saved or ()),
        itemsize=jnp.dtype(DTYPES[config.precision.compute]).itemsize,
        apart=schedule is not None and splits_backward(schedule),
    )
    for depth in config.first_depths():
        for slot in config.chunk_slots():
            own = replace(runs, again=times, branch=True) if len(slot.options) > 1 else runs
            yield slot.options[slot.choice[depth]], own


def shares_run(config: Config, kind: str) -> tuple[float, float]:
    """Of the places that the first stage has for parameters of this kind, the share whose layers
    run there, since at the others its layers have another kind; and that of those in branches.
    """
    run = branches = places = 0
    for depth in config.first_depths():
        for slot in config.chunk_slots():
            chosen = kind in slot.options[slot.choice[depth]].kinds
            run += chosen
            branches += chosen and len(slot.options) > 1
            places += slot.has(kind)
    return run / places, branches / places


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
    yield ring("vocabulary", ALL_REDUCE, ["pipe"], 4 * n * train.microbatches, layout)


def weight_traffic(config: Config, layout: Layout) -> Iterator[Traffic]:
    """Of each parameter, P its bytes on a device before ZeRO cuts it, G micro-batches (ZeRO:
    arXiv 1910.02054, hybrid sharding: 2304.11277, data parallel: 2006.15704).

    Stage 3 gathers P twice for each product in a block, forward and backward, once more in a branch
    (`LayerRuns.branch`), and once for each use of a vocabulary table; it reduce-scatters P once
    each; all of it G times. Stage 2 reduce-scatters P G times, stage 1 once, and both gather P in
    f32 after the update. Once a step, what a device then holds is all-reduced over every axis that
    does not cut it.
    """
    activations = jnp.dtype(DTYPES[config.precision.compute]).itemsize
    reduce, master = jnp.dtype(layout.reduce).itemsize, 4
    params = abstract_state(config).params
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_param)
    for path, param in leaves:
        in_block = path[0].name == "layers"
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
        missing = [axis for axis in reduced_axes(layout) if axis not in state]
        times, gathers = config.train.microbatches, uses * config.train.microbatches
        if in_block:
            run, branches = shares_run(config, path[1].name)
            times = passes(config) * run
            gathers = passes(config) * (2 * run + branches)
        n = whole * times
        yield ring("ZeRO-3 weights", ALL_GATHER, gathered, whole * gathers * compute, layout)
        yield ring("ZeRO-3 gradients", REDUCE_SCATTER, gathered, n * uses * reduce, layout)
        yield ring("ZeRO-2 gradients", REDUCE_SCATTER, scattered, n * reduce, layout)
        yield ring("ZeRO-1 gradients", REDUCE_SCATTER, late, whole * reduce, layout)
        yield ring("updated parameters", ALL_GATHER, [*scattered, *late], whole * master, layout)
        rest = whole // layout.size(cut) * reduce
        yield ring("gradients", ALL_REDUCE, missing, rest, layout)


def layer_traffic(config: Config, layout: Layout) -> Iterator[Traffic]:
    """Of the layers, as they say of themselves."""
    for layer, runs in layer_runs(config, layout):
        yield from layer_sent(config.model, layer, runs, layout)


def ends_traffic(config: Config, layout: Layout) -> Iterator[Traffic]:
    """Of embedding and output layer over tensor, n the bytes of the residual stream on a tensor
    group. The embedding is one exit, the output layer one entrance, whose backward is part of the
    same sweep. Once a micro-batch and chunk positions and documents, two integers of each token,
    are gathered over context.
    """
    model, train = config.model, config.train
    rows = train.batch_size // train.microbatches // layout.size(layout.axes("batch"))
    tokens = rows * train.seq_len // layout.size("context")
    n = tokens * model.d_model * jnp.dtype(DTYPES[config.precision.compute]).itemsize
    ends = 2 * train.microbatches
    if layout.config.sequence_parallel:
        yield ring("activations", ALL_GATHER, ["tensor"], ends * n, layout)
        yield ring("activations", REDUCE_SCATTER, ["tensor"], ends * n, layout)
    else:
        yield ring("activations", ALL_REDUCE, ["tensor"], ends * n, layout)

    schedule = config.pipeline()
    chunks = 1 if schedule is None else schedule.chunks
    places = 2 * 4 * chunks * rows * passes(config) * train.seq_len
    yield ring("places of tokens", ALL_GATHER, ["context"], places, layout)

    # three statistics of each token's logits: maximum, sum of exponentials, target
    statistics = 4 if train.label_smoothing else 3
    axes = layout.axes("vocab")
    chunk = min(tokens_at_once(model.padded_vocab // layout.size(axes)), tokens)
    padded = math.ceil(tokens / chunk) * chunk * train.microbatches
    yield ring("logits", ALL_REDUCE, axes, statistics * padded * 4, layout)


def scalar_traffic(config: Config, layout: Layout) -> Iterator[Traffic]:
    """Four bytes each: the number of targets, logged sums, the gradients' sum of squares."""
    train, everywhere = config.train, reduced_axes(layout)
    yield ring("metrics", ALL_REDUCE, [*layout.axes("batch"), "context"], 4, layout)
    sums = 1 + bool(train.z_loss) + bool(train.label_smoothing)
    if adds_loss(config.model):
        yield ring("metrics", ALL_REDUCE, [*layout.axes("batch"), "context"], 4, layout)
    sums += measured(config.model)
    yield ring("metrics", ALL_REDUCE, everywhere, 4 * sums, layout)
    if train.halt_on_nan:
        leaves = len(jax.tree.leaves(abstract_state(config).params))
        yield ring("metrics", ALL_REDUCE, everywhere, 4 * train.microbatches * leaves, layout)
    yield ring("global norm", ALL_REDUCE, everywhere, 4, layout)


def optimizer_traffic(config: Config, layout: Layout) -> Iterator[Traffic]:
    """Of the update rule, as it says of itself for each parameter."""
    for param in jax.tree.leaves(abstract_state(config).params, is_leaf=is_param):
        yield from optimizer_sent(config.optimizer, param, layout)
