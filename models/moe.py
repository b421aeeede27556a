"""Mixture of experts: an MLP of which each token uses the few experts that its router chooses.

The residual stream is [B, S_{context,tensor}, D]. Where `tensor` is one of the axes that share out
experts, each device sends its own tokens; where it is not, it cuts each expert's hidden width, and
the sequence is gathered first and reduce-scattered afterwards, as for any MLP. Shapes: E experts of
hidden width F, k choices of a token.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ..sharding.collectives import all_gather, all_reduce, axis_index, reduce_scatter
from ..sharding.exchange import meet_experts
from ..sharding.grouped import Groups, Weights, grouped_linear
from ..sharding.layout import Layout
from ..sharding.linear import SEQUENCE, linear
from . import init
from .config import ModelConfig
from .dropout import ROUTER, chances
from .mlp import Mlp, swiglu
from .router import Route, balance, count_choices, log_partition, own_tokens, route

TOKENS = 0


class Moe(nnx.Module):
    """router [D, E]; gate, up [E, D, F], down [E, F, D]; shared: the experts that all meet."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        assert config.experts is not None
        d, f, e = config.d_model, config.expert_width, config.experts
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
        shared = config.shared_experts
        self.shared = Mlp(config, key, shared * f, "shared") if shared else None


class Routing(NamedTuple):
    """What routers need beside tokens. bias [L, E], of one layer [E]: see `route`. In training,
    token: what one token adds to a mean over the global batch's; rows [B, 2]: words of keys by
    which second experts are left out, None where none is.
    """

    bias: jax.Array | None = None
    token: jax.Array | None = None
    rows: jax.Array | None = None

    def of_layer(self, layer: jax.Array) -> Routing:
        """Of the layer with experts of that number."""
        return self if self.bias is None else self._replace(bias=self.bias[layer])


class Tally(NamedTuple):
    """This device's shares of what the routers of L layers did. balance, partition: the losses,
    weighted. load [L, E], dropped [L]: choices, and those that found no room; int32. rounds: of
    exchanges, int32.
    """

    balance: jax.Array
    partition: jax.Array
    load: jax.Array
    dropped: jax.Array
    rounds: jax.Array


def empty_tally(layers: int, config: ModelConfig) -> Tally:
    assert config.experts is not None
    zero, load = jnp.zeros(()), jnp.zeros((layers, config.experts), jnp.int32)
    return Tally(zero, zero, load, load[:, 0], jnp.zeros((), jnp.int32))


def add_layer(tally: Tally, one: Tally, layer: jax.Array) -> Tally:
    """`tally` with what layer number `layer` did."""
    return Tally(
        tally.balance + one.balance,
        tally.partition + one.partition,
        tally.load.at[layer].add(one.load),
        tally.dropped.at[layer].add(one.dropped),
        tally.rounds + one.rounds,
    )


def log_tally(tally: Tally, config: ModelConfig) -> dict[str, jax.Array]:
    """The sums to log, by name. Losses that are off are left out."""
    sums = {"expert_load": tally.load, "expert_rounds": tally.rounds}
    if config.capacity is not None:
        sums["dropped"] = tally.dropped
    if config.balance_loss:
        sums["balance_loss"] = tally.balance
    if config.router_z_loss:
        sums["router_z_loss"] = tally.partition
    return sums


def moe(
    p: Moe,
    x: jax.Array,
    segments: jax.Array,
    routing: Routing,
    number: jax.Array | int,
    layout: Layout,
    config: ModelConfig,
) -> tuple[jax.Array, Tally]:
    """x[B, S_{context,tensor}, D] -> the same, and the tally of one layer. segments [B, S_context];
    routing: this layer's; number: of the layer, to leave second experts out by.
    """
    segments = own_tokens(segments, layout)
    if p.shared is None:  # else the shared experts' products name it
        x = checkpoint_name(x, "mlp.norm")
    with jax.named_scope("router"), jax.default_matmul_precision("float32"):
        logits = linear(x.astype(jnp.float32), p.router, layout)
        chance = None
        if routing.rows is not None:
            chance = chances(routing.rows, x.shape[1], number, ROUTER, layout)
        routed = route(logits, segments >= 0, routing.bias, chance, config)
    y, rounds = _experts(p, x, routed, layout, config)
    if p.shared is not None:
        y = y + swiglu(p.shared, x, layout)
    return y, _tally(routed, logits, segments, rounds, routing, layout, config)


def _experts(
    p: Moe, x: jax.Array, routed: Route, layout: Layout, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """What the chosen experts make of x, in x's layout, and the rounds of exchange it took."""
    tree, apart = (x, routed.experts, routed.gates), "tensor" in layout.axes("expert")
    gathers = layout.sequence_parallel and not apart
    slices = apart and not layout.sequence_parallel
    if gathers:
        tree = jax.tree.map(lambda a: all_gather(a, "tensor", SEQUENCE, layout), tree)
    rows, tokens = tree[0].shape[:2]
    flat, experts, gates = jax.tree.map(lambda a: a.reshape(rows * tokens, -1), tree)
    if slices:  # tensor's devices hold the same tokens: each sends a part of them
        padding = -len(flat) % layout.size("tensor")
        experts = jnp.pad(experts, ((0, padding), (0, 0)), constant_values=config.experts or 0)
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
    if config.slots is None or config.routing_group is None:
        return None
    whole, rest = divmod(tokens, config.routing_group)
    return config.slots * (whole + 2 if rest else whole)


def _tally(
    routed: Route,
    logits: jax.Array,
    segments: jax.Array,
    rounds: jax.Array,
    routing: Routing,
    layout: Layout,
    config: ModelConfig,
) -> Tally:
    """Without sequence parallelism tensor's devices see the same tokens: losses are divided by
    their number, counts are the first one's.
    """
    assert config.experts is not None
    copies = 1 if layout.sequence_parallel else layout.size("tensor")
    balanced = partition = jnp.zeros(())
    if routing.token is not None:
        token = routing.token / copies
        if config.balance_loss:
            unit = balance(routed, segments, layout.axes("seq"), config, layout)
            balanced = config.balance_loss * token * unit
        if config.router_z_loss:
            partition = config.router_z_loss * token * log_partition(logits, segments >= 0)
    load, dropped = count_choices(routed.chosen, config.experts), routed.dropped
    if copies > 1:
        first = axis_index("tensor", layout) == 0
        load, dropped = jnp.where(first, load, 0), jnp.where(first, dropped, 0)
    return Tally(balanced, partition, load, dropped, rounds)
