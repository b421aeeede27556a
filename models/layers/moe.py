"""Mixture of experts: an MLP of which each token uses the few experts that its router chooses.

The residual stream is [B, S_{context,tensor}, D]. Where `tensor` is one of the axes that share out
experts, each device sends its own tokens; where it is not, it cuts each expert's hidden width, and
the sequence is gathered first and reduce-scattered afterwards, as for any MLP. Shapes: E experts of
hidden width F, k choices of a token, n layers with experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ...sharding.collectives import all_gather, all_reduce, axis_index, reduce_scatter
from ...sharding.exchange import exchange_sent, meet_experts
from ...sharding.grouped import Groups, Weights, grouped_linear
from ...sharding.layout import Layout
from ...sharding.linear import SEQUENCE, linear
from ...sharding.traffic import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, LayerRuns, Traffic, ring
from .. import init
from ..config import ModelConfig
from ..dropout import ROUTER, chances
from ..inputs import LayerInputs
from ..pattern import Layer
from .router import (
    Route,
    aux_loss,
    aux_loss_sent,
    count_choices,
    own_tokens,
    route,
    squared_log_partition,
)
from .sublayer import Kind, Sublayer, Tally
from .swiglu import Mlp, swiglu, swiglu_sent

TOKENS = 0


class Moe(Sublayer):
    """router [D, E]; gate, up [E, D, F], down [E, F, D]; shared: the experts that all meet."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        super().__init__(config)
        experts = config.moe.experts
        assert experts is not None
        d, f, e = config.d_model, config.expert_width, experts
        wide, back = (
            ("expert", "expert_embed", "expert_mlp"),
            ("expert", "expert_mlp", "expert_embed"),
        )
        self.router = init.matrix(key, config, "router", ("embed", "routes"), (d, e), fan_in=d)
        self.gate = init.matrix(key, config, "experts.gate", wide, (e, d, f), fan_in=d)
        self.up = init.matrix(key, config, "experts.up", wide, (e, d, f), fan_in=d)
        self.down = init.matrix(
            key, config, "experts.down", back, (e, f, d), fan_in=f, residual=True
        )
        shared = config.moe.shared_experts
        self.shared = Mlp(config, key, shared * f, "shared") if shared else None


def _apply(p: Moe, x: jax.Array, layer: Layer, inputs: LayerInputs) -> tuple[jax.Array, Tally]:
    layout, config = inputs.layout, inputs.config
    segments = own_tokens(inputs.segments, layout)
    if p.shared is None:  # else the shared experts' products name it
        x = checkpoint_name(x, "mlp.norm")
    with jax.named_scope("router"), jax.default_matmul_precision("float32"):
        logits = linear(x.astype(jnp.float32), p.router, layout)
        chance = None
        if config.moe.second_expert == "random" and inputs.dropout is not None:
            rows = inputs.dropout.rows
            chance = chances(rows, x.shape[1], inputs.number, ROUTER, layout)
        bias = inputs.buffers["moe"] if inputs.buffers else None
        routed = route(logits, segments >= 0, bias, chance, config.moe)
    y, rounds = _experts(p, x, routed, layout, config)
    if p.shared is not None:
        y = y + swiglu(p.shared, x, layout)
    return y, _tally(routed, logits, segments, rounds, inputs)


def _extend(
    p: Moe, x: jax.Array, layer: Layer, inputs: LayerInputs, cache: None, place: jax.Array
) -> tuple[jax.Array, None]:
    """No expert's capacity is limited: pieces are shorter than routing groups."""
    free = replace(inputs.config.moe, capacity_factor=None, routing_group=None, overflow="position")
    inputs = replace(inputs, config=replace(inputs.config, moe=free))
    return _apply(p, x, layer, inputs)[0], None


def _experts(
    p: Moe, x: jax.Array, routed: Route, layout: Layout, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """What the chosen experts make of x, in x's layout, and the rounds of exchange it took."""
    tree, apart = (x, routed.experts, routed.gates), "tensor" in layout.axes("expert")
    gathers = layout.config.sequence_parallel and not apart
    slices = apart and not layout.config.sequence_parallel
    if gathers:
        tree = jax.tree.map(lambda a: all_gather(a, "tensor", SEQUENCE, layout), tree)
    rows, tokens = tree[0].shape[:2]
    flat, experts, gates = jax.tree.map(lambda a: a.reshape(rows * tokens, -1), tree)
    if slices:  # tensor's devices hold the same tokens: each sends a part of them
        padding = -len(flat) % layout.size("tensor")
        experts = jnp.pad(experts, ((0, padding), (0, 0)), constant_values=config.moe.experts or 0)
        flat, gates = (jnp.pad(a, ((0, padding), (0, 0))) for a in (flat, gates))
        size = len(flat) // layout.size("tensor")
        flat, experts, gates = (
            lax.dynamic_slice_in_dim(a, axis_index("tensor", layout) * size, size, TOKENS)
            for a in (flat, experts, gates)
        )
    weights = (p.gate, p.up, p.down)
    limit = expert_limit(len(flat), config)
    y, rounds = meet_experts(flat, experts, gates, weights, _swiglu_of_choices, layout, limit)
    y = y.astype(x.dtype)
    if slices:
        y = all_gather(y, "tensor", TOKENS, layout)[: rows * tokens]
    y = y.reshape(rows, tokens, -1)
    if gathers:
        y = reduce_scatter(y, "tensor", SEQUENCE, layout)
    elif not apart:
        y = all_reduce(y, "tensor", layout)
    return y, rounds


def _swiglu_of_choices(
    x: jax.Array, gates: jax.Array, weights: Any, axes: Any, groups: Groups, layout: Layout
) -> jax.Array:
    """The kernel of `meet_experts`."""
    gate, up = grouped_linear(x, Weights(weights[:2], axes[:2]), groups, layout, enter=True)
    gate, up = (checkpoint_name(a, "mlp.gate_up") for a in (gate, up))
    hidden = _gated(gate, up, gates).astype(x.dtype)
    hidden = checkpoint_name(hidden, "mlp.hidden")
    down = Weights(weights[2:], axes[2:])
    (y,) = grouped_linear(hidden, down, groups, layout, leave=x.shape[0])
    return y


@partial(jax.checkpoint, prevent_cse=False)  # its parts are k rows a token, and cheap
def _gated(gate: jax.Array, up: jax.Array, gates: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up * gates


def expert_limit(tokens: int, config: ModelConfig) -> int | None:
    """Most choices of one expert by `tokens` tokens in the order of the sequence."""
    slots, group = config.moe.slots, config.moe.routing_group
    if slots is None or group is None:
        return None
    whole, rest = divmod(tokens, group)
    return slots * (whole + 2 if rest else whole)


def _tally(
    routed: Route, logits: jax.Array, segments: jax.Array, rounds: jax.Array, inputs: LayerInputs
) -> Tally:
    """expert_load [E], dropped: choices, and those that found no room; expert_rounds: of exchanges;
    all int32. Without sequence parallelism tensor's devices see the same tokens: losses are divided
    by their number, counts are the first one's.
    """
    config, layout = inputs.config.moe, inputs.layout
    assert config.experts is not None
    copies = 1 if layout.config.sequence_parallel else layout.size("tensor")
    load, dropped = count_choices(routed.chosen, config.experts), routed.dropped
    if copies > 1:
        first = axis_index("tensor", layout) == 0
        load, dropped = jnp.where(first, load, 0), jnp.where(first, dropped, 0)
    by_layer = {"expert_load": load}
    if config.capacity_factor is not None:
        by_layer["dropped"] = dropped
    losses = {}
    if inputs.token_share is not None:
        share = inputs.token_share / copies
        if config.aux_loss:
            unit = aux_loss(routed, segments, layout.axes("seq"), config, layout)
            losses["router_aux_loss"] = config.aux_loss * share * unit
        if config.z_loss:
            squares = squared_log_partition(logits, segments >= 0)
            losses["router_z_loss"] = config.z_loss * share * squares
    loss = sum(losses.values(), jnp.zeros(()))
    return Tally(loss, losses | {"expert_rounds": rounds}, by_layer)


def _measured(config: ModelConfig) -> tuple[int, int]:
    moe = config.moe
    assert moe.experts is not None
    by_layer = moe.experts + (moe.capacity_factor is not None)
    return by_layer, 1 + bool(moe.aux_loss) + bool(moe.z_loss)


def _first_bias(config: ModelConfig) -> jax.Array | None:
    """[E]: what is added to scores where experts are chosen; None without bias_update_rate."""
    if not config.moe.bias_update_rate or config.moe.experts is None:
        return None
    return jnp.zeros((config.moe.experts,), jnp.float32)


def _next_bias(bias: jax.Array, sums: dict[str, jax.Array], config: ModelConfig) -> jax.Array:
    """After an update: more for experts that were chosen less often than the mean, less for the
    others (arXiv 2408.15664). Counts are integers, so it is the same on every mesh. bias [n, E].
    """
    load = sums["expert_load"]
    # the mean lies between these two; total - load·E would outgrow 32 bits
    total, count = jnp.sum(load, axis=-1, keepdims=True), load.shape[-1]
    sign = (load < -(-total // count)).astype(jnp.float32) - (load > total // count)
    return bias + config.moe.bias_update_rate * sign


def _metrics(sums: dict[str, jax.Array], pieces: int) -> dict[str, jax.Array]:
    """expert_load [n]: choices of each layer's most chosen expert over the mean; dropped: share of
    choices that found no room; expert_rounds: exchanges of a micro-batch and layer, 0 where nothing
    travels.
    """
    load = sums["expert_load"].astype(jnp.float32)
    mean = jnp.maximum(jnp.mean(load, axis=-1), 1e-30)
    figures = {
        "expert_load": jnp.max(load, axis=-1) / mean,
        "expert_rounds": sums["expert_rounds"] / (pieces * len(load)),
    }
    if "dropped" in sums:
        figures["dropped"] = jnp.sum(sums["dropped"]) / jnp.maximum(jnp.sum(load), 1.0)
    return sums | figures


def _flops(config: ModelConfig, layer: Layer, tokens: int) -> float:
    """Of the experts that a token chooses and of those that all share; dropped choices are not
    deducted.
    """
    moe, d = config.moe, config.d_model
    assert moe.experts is not None
    met = moe.experts_per_token + moe.shared_experts
    return 2.0 * tokens * d * (3 * met * config.expert_width + moe.experts)


def _sent(config: ModelConfig, layer: Layer, runs: LayerRuns, layout: Layout) -> Iterator[Traffic]:
    """Where tensor cuts experts' width, tokens are gathered over it first, and what experts make of
    them is reduce-scattered; where it shares experts out and the sequence is whole on it, each of
    its devices takes a part of the tokens.
    """
    moe, axes = config.moe, layout.axes("expert")
    assert moe.experts is not None
    if moe.shared_experts:
        yield from swiglu_sent(config, runs, layout, read_again=config.norm != "pre")
    width, whole = moe.experts_per_token, runs.tokens(layout)
    small, x = 4 * whole * width, whole * config.d_model * runs.itemsize
    apart, sequence = "tensor" in axes, layout.config.sequence_parallel
    times, again = runs.passes, runs.again
    read_again = again if config.norm != "pre" else 0
    if sequence and not apart:
        gathers = (2 * times + again) * x + 2 * (times + again) * small
        yield ring("tokens for experts", ALL_GATHER, ["tensor"], gathers, layout)
        scatters = times * (2 * x + small) + read_again * x
        yield ring("tokens for experts", REDUCE_SCATTER, ["tensor"], scatters, layout)
    elif not apart:
        n = (2 * times + read_again) * x
        yield ring("tokens for experts", ALL_REDUCE, ["tensor"], n, layout)
    elif not sequence:
        n = (times + read_again) * x
        yield ring("tokens for experts", ALL_GATHER, ["tensor"], n, layout)
        yield ring("tokens for experts", REDUCE_SCATTER, ["tensor"], times * x, layout)
    own = whole // layout.size("tensor") if apart else whole
    limit = expert_limit(own, config)
    yield from exchange_sent(own * width, moe.experts, config.d_model, limit, runs, layout)
    if moe.aux_loss:
        yield from aux_loss_sent(moe, runs, layout)


MOE = Kind(
    scope="moe",
    params=Moe,
    apply=_apply,
    flops=_flops,
    sent=_sent,
    extend=_extend,
    adds_loss=True,
    random=lambda config: config.moe.second_expert == "random",
    buffers=_first_bias,
    next_buffers=_next_bias,
    measured=_measured,
    metrics=_metrics,
)
