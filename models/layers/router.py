"""Which experts a token meets, and how much of each: the router's scores, its choices, the losses
that keep it balanced. All in f32.

Routers of Switch (top-1, arXiv 2101.03961), GShard (top-2, 2006.16668), Mixtral (2401.04088) and
DeepSeek-V3 (sigmoid scores, groups of experts, a bias instead of a loss: 2412.19437, 2408.15664).
Padding chooses no expert, so it takes no capacity and enters no statistics. Shapes: B sequences, S
tokens of this device's part of them, E experts, k choices of a token.

Choices are compared on a grid. Two layouts round a score differently, by about 1e-7 of it for each
sum on the way, so numbers that are equal by mathematics (those of repeated tokens, of experts that
are alike) would be ordered by chance. Scores are compared to CHOICE_BITS, claims on an expert's
room to CLAIM_BITS, and what is equal goes by number: lower groups and experts first; first choices
before second ones, then earlier tokens before later ones. Gates keep their full precision. No grid
makes a choice continuous: equal values that lie on a boundary of the grid may still part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ...sharding.collectives import all_reduce, axis_index
from ...sharding.layout import Layout
from ...sharding.traffic import ALL_REDUCE, LayerRuns, Traffic, ring
from ..config import ROUTE, MoeConfig

CHOICE_BITS = 12
"""Bits after the first of a score, where experts and groups are chosen: steps of 2.4e-4 of it at
most, so one of model.moe.bias_update_rate=0.001 counts. A group's worth is the sum of two such
numbers, the same in any order.
"""

CLAIM_BITS = 6
"""Bits after the first of a claim: steps of 1.6% of it at most. All tokens of a routing group are
compared with each other, so equal claims are common and must lie on a boundary seldom, while claims
that are nearly equal may as well go by position.
"""


class Route(NamedTuple):
    """Which experts a token goes to."""

    experts: jax.Array
    """int32 [B, S, k]; E where a choice is void"""
    gates: jax.Array
    """[B, S, k], factors on what those experts give"""
    chosen: jax.Array
    """[B, S, k], the experts before a second one was left out or capacity ran out"""
    dropped: jax.Array
    """int32, choices that found no room"""
    shares: jax.Array
    """[B, S, E], the router's probabilities"""


def route(
    logits: jax.Array,
    real: jax.Array,
    bias: jax.Array | None,
    chance: jax.Array | None,
    config: MoeConfig,
) -> Route:
    """logits [B, S, E] -> each token's choices. real [B, S]: false for padding. bias [E]: added to
    scores where experts are chosen, not where they are weighed. chance [B, S] in [0, 1): leaves
    second experts out (model.moe.second_expert=random), None never does.
    """
    assert config.experts is not None
    if config.scores == "softmax":
        scores = shares = jax.nn.softmax(logits)
    else:
        scores = jax.nn.sigmoid(logits)
        shares = scores / jnp.sum(scores, axis=-1, keepdims=True)
    choosing = lax.stop_gradient(scores)
    if bias is not None:
        choosing = choosing + bias[None, None]
    choosing = _on_grid(choosing, CHOICE_BITS)
    best = lax.top_k(_of_best_groups(choosing, config), config.experts_per_token)[1]
    best = checkpoint_name(best, ROUTE)

    gates = claims = jnp.take_along_axis(scores, best, axis=-1)
    if config.normalize_gates:
        gates = gates / jnp.maximum(jnp.sum(gates, axis=-1, keepdims=True), 1e-20)
    chosen = experts = jnp.where(real[..., None], best, config.experts)
    if chance is not None:
        left_out = checkpoint_name(chance >= 2 * lax.stop_gradient(gates[..., 1]), ROUTE)
        second = jnp.where(left_out, config.experts, experts[..., 1])
        experts = jnp.stack([experts[..., 0], second], axis=-1)
    dropped = jnp.zeros((), jnp.int32)
    if config.slots is not None:
        void = checkpoint_name(~_fits(experts, lax.stop_gradient(claims), config), ROUTE)
        dropped = jnp.sum(void & (experts < config.experts))
        experts = jnp.where(void, config.experts, experts)
    return Route(experts, gates * config.gate_scale, chosen, dropped, shares)


def _on_grid(a: jax.Array, bits: int) -> jax.Array:
    """The nearest number with so many bits after its first."""
    return lax.reduce_precision(a, exponent_bits=8, mantissa_bits=bits)


def _of_best_groups(scores: jax.Array, config: MoeConfig) -> jax.Array:
    """scores [B, S, E] with those outside a token's best groups put below all others; a group is
    worth its two best.
    """
    groups, allowed = config.groups, config.groups_per_token
    if allowed is None or allowed == groups:
        return scores
    grouped = scores.reshape(*scores.shape[:2], groups, -1)
    worth = jnp.sum(lax.top_k(grouped, min(2, grouped.shape[-1]))[0], axis=-1)
    best = lax.top_k(worth, allowed)[1]
    kept = jnp.any(best[..., None] == jnp.arange(groups)[None, None, None], axis=-2)
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(scores.shape)


def _fits(experts: jax.Array, claims: jax.Array, config: MoeConfig) -> jax.Array:
    """[B, S, k]: whether a choice is among the first `slots` of its expert's in its routing group.
    What is dropped so depends on the group alone, which no mesh cuts. claims [B, S, k]: who comes
    first, by model.moe.overflow=probability.
    """
    assert config.slots is not None and config.routing_group is not None
    size, width = config.routing_group, experts.shape[-1]

    def by_group(a: jax.Array) -> jax.Array:  # [B, S, k] -> [groups, k·tokens], first choices first
        return a.reshape(-1, size, width).swapaxes(1, 2).reshape(-1, width * size)

    queue, claims = by_group(experts), by_group(-_on_grid(claims, CLAIM_BITS))
    if config.overflow == "position":
        claims = jnp.zeros_like(claims)
    number = lax.broadcasted_iota(jnp.int32, queue.shape, 1)
    queue, _, choice = lax.sort((queue, claims, number), num_keys=2, is_stable=True)
    starts = jnp.pad(queue[:, 1:] != queue[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    rank = number - lax.cummax(jnp.where(starts, number, 0), axis=1)
    fits = lax.sort((choice, (rank < config.slots).astype(jnp.int32)), num_keys=1)[1] > 0
    return fits.reshape(-1, width, size).swapaxes(1, 2).reshape(experts.shape)


def count_choices(chosen: jax.Array, count: int) -> jax.Array:
    """[count] int32: how often each expert is chosen."""
    return jnp.zeros((count,), jnp.int32).at[chosen.reshape(-1)].add(1, mode="drop")


def aux_loss(
    route: Route, segments: jax.Array, sequence: Sequence[str], config: MoeConfig, layout: Layout
) -> jax.Array:
    """This device's share of E·Σ_e f_e·P_e, summed over tokens: f_e the share of expert e in the
    choices of a token's unit, P_e its mean probability there. It is 1 for each token where choices
    are even (2101.03961).

    The unit is a document's part of a row, or all of a micro-batch. Units count by their tokens,
    so packing changes nothing. sequence: mesh axes that cut rows. All-reduces 4·B·S·E bytes, S
    whole, over them, or 4·E over all that see other tokens.
    """
    assert config.experts is not None
    count = config.experts
    if config.aux_loss_over == "microbatch":
        counts = count_choices(route.chosen, count)
        counts = all_reduce(counts, (*layout.axes("batch"), *sequence), layout)
        evenness = counts / jnp.maximum(jnp.sum(counts), 1)
        shares = jnp.sum(jnp.where(segments[..., None] >= 0, route.shares, 0.0), axis=(0, 1))
        return count * jnp.sum(evenness * shares)
    rows, tokens = segments.shape
    documents = tokens * layout.size(sequence)  # no row has more than tokens
    row = jnp.arange(rows)[:, None]
    unit = jnp.where(segments >= 0, segments, documents)
    counts = jnp.zeros((rows, documents, count), jnp.int32)
    counts = counts.at[row[..., None], unit[..., None], route.chosen].add(1, mode="drop")
    counts = all_reduce(counts, sequence, layout)
    counts = counts.at[row, unit].get(mode="fill", fill_value=0)  # [B, S, E]; padding: none
    evenness = counts / jnp.maximum(jnp.sum(counts, axis=-1, keepdims=True), 1)
    return count * jnp.sum(evenness * route.shares)


def aux_loss_sent(config: MoeConfig, runs: LayerRuns, layout: Layout) -> Iterator[Traffic]:
    """What `aux_loss` sends for one layer in a step, forward and in each recomputation."""
    assert config.experts is not None
    counted = 4 * config.experts * (runs.passes + runs.again)
    if config.aux_loss_over == "microbatch":
        everywhere = [*layout.axes("batch"), *layout.axes("seq")]
        yield ring("router's loss", ALL_REDUCE, everywhere, counted, layout)
    else:
        n = runs.rows * runs.seq_len * counted
        yield ring("router's loss", ALL_REDUCE, layout.axes("seq"), n, layout)


def squared_log_partition(logits: jax.Array, real: jax.Array) -> jax.Array:
    """Sum over real tokens of the squared logsumexp of their logits (ST-MoE: 2202.08906)."""
    return jnp.sum(jnp.where(real, jax.nn.logsumexp(logits, axis=-1) ** 2, 0.0))


def own_tokens(a: Any, layout: Layout) -> Any:
    """A[B, S_context] -> A[B, S_{context,tensor}], of what the batch gives a whole tensor group."""
    if not layout.config.sequence_parallel:
        return a
    size = a.shape[1] // layout.size("tensor")
    return lax.dynamic_slice_in_dim(a, axis_index("tensor", layout) * size, size, axis=1)
