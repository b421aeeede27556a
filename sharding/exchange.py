"""Expert parallelism: each token's row goes to the devices that hold its experts, and comes back.

Experts are shared out over the mesh axes of `layout.experts`, any that see different tokens or
could: attention's mesh folded otherwise (arXiv 2504.14960). Rows travel in all-to-alls of a fixed
number of rows for each pair of devices. Where a capacity bounds them, one is enough. Without one,
rounds go on until the longest queue is empty, so that nothing is dropped and no buffer is as large
as the worst case; they have their own VJP, which runs the same rounds and sends the rows again
instead of keeping them. Gates travel with the rows, so what comes back is only added up.

What experts do is the caller's `Kernel`. Shapes: T tokens of this device with k choices each, N =
T·k, D width; P devices that share experts, E experts in all, C rows that one sends another at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from .collectives import all_reduce_max, all_to_all_rows
from .grouped import Groups, collect, group_rows, sort_choices, spread
from .layout import Layout
from .linear import gather_weight, scatter_gradient
from .traffic import ALL_REDUCE, ALL_TO_ALL, LayerRuns, Traffic, ring

Kernel = Callable[..., jax.Array]
"""(x[T, D], gates[M, 1] in f32, weights, axes, groups, layout) -> y[T, D] in f32: what the experts
of each one's choices make of it, times the gates of their rows, added up. x: tokens, or rows that
arrived with one choice each. weights: shards [E_experts, ...] for `grouped_linear`, axes: their
logical axes. Differentiable in its first three; weights cut over tensor leave y partial over it.
"""

SLACK = 1.25
"""Rows of a round, over what is sent in it where all experts are chosen equally often."""


@dataclass(frozen=True)
class _Plan:
    """The static half of an exchange. rows: C."""

    kernel: Kernel
    layout: Layout
    axes: tuple[tuple[str, ...], ...]
    experts: int
    rows: int

    @property
    def devices(self) -> int:
        return self.layout.size(self.layout.axes("expert"))


class _Queues(NamedTuple):
    """Choices sorted by device. experts [N] of each choice, E for none; order [N]: choices as they
    queue; place [N]: each one's place in its queue; start, length [P] of the queues.
    """

    experts: jax.Array
    order: jax.Array
    place: jax.Array
    start: jax.Array
    length: jax.Array


def meet_experts(
    x: jax.Array,
    experts: jax.Array,
    gates: jax.Array,
    weights: Sequence[nnx.Param],
    kernel: Kernel,
    layout: Layout,
    limit: int | None,
) -> tuple[jax.Array, jax.Array]:
    """x[T, D] with experts[T, k], E for none, and gates[T, k] -> y[T, D], the sum of what they make
    of it, in f32, and the rounds it took, 0 where nothing travels.

    limit: most rows that one expert gets from this device, None: all may choose the same. Of C
    rows of D elements in x's dtype for each device, (P-1)/P travel there and as much back, in one
    round with C = limit·E/P, else in each round with C = SLACK·N/P; backward rows go there once
    more in rounds, and in any case gradients go there and back. Each row has an integer and a
    float with it.
    """
    devices, choices = layout.size(layout.axes("expert")), experts.size
    count = weights[0].shape[-3] * devices
    shards = tuple(weight[...] for weight in weights)
    axes = tuple(weight.axes for weight in weights)
    flat, gates = experts.reshape(-1), gates.reshape(-1)
    if devices == 1:
        plan = _Plan(kernel, layout, axes, count, 0)
        return _compute(x, flat, gates, shards, plan), jnp.zeros((), jnp.int32)
    rows = exchange_rows(choices, count, devices, limit)
    plan = _Plan(kernel, layout, axes, count, rows)
    if limit is None:
        return _rounds(x, gates, shards, _queue(flat, plan), plan)
    y = _one_round(0, x, gates, shards, _queue(flat, plan), plan)
    return y, jnp.ones((), jnp.int32)


def exchange_rows(choices: int, experts: int, devices: int, limit: int | None) -> int:
    """C for N choices: see `meet_experts`."""
    fair = math.ceil(SLACK * choices / devices) if limit is None else limit * experts // devices
    return min(fair, choices)


def exchange_sent(
    choices: int, experts: int, width: int, limit: int | None, runs: LayerRuns, layout: Layout
) -> Iterator[Traffic]:
    """What `meet_experts` sends for one layer in a step; N choices of a micro-batch, rows of
    `width` elements, one round where a limit does not say how many there are.

    P·C rows go to their experts and what these make of them comes back: 2 P·C·h·(P-1)/P forward,
    h the bytes of a row, and of their gradients as much backward. With a limit a recomputation
    sends rows again; without, the backward pass does. A gate and an expert's number, and the gate's
    gradient, travel with a row.
    """
    axes = layout.axes("expert")
    devices = layout.size(axes)
    sent = devices * exchange_rows(choices, experts, devices, limit)
    x, there = width * runs.itemsize, width * runs.itemsize + 8
    if limit is None:
        row = runs.passes * (2 * there + 3 * x + 4)
        yield ring("rounds", ALL_REDUCE, axes, 2 * 4 * runs.passes, layout)
    else:
        row = runs.passes * (there + 3 * x + 4) + runs.again * there
    yield ring("experts' tokens", ALL_TO_ALL, axes, sent * row, layout)


def _compute(x: jax.Array, experts: Any, gates: Any, shards: Any, plan: _Plan) -> jax.Array:
    """What this device's experts make of x[T, D]: [T, D] in f32. experts and gates: of
    each one's choices, one after the other.
    """
    groups: Groups = group_rows(experts, plan.experts // plan.devices)
    weight = spread(gates[:, None], groups.choices, groups.slots, 1)
    return plan.kernel(x, weight, shards, plan.axes, groups, plan.layout)


def _queue(experts: jax.Array, plan: _Plan) -> _Queues:
    order, start, number = sort_choices(experts, plan.experts)
    start = start.reshape(plan.devices, -1)[:, 0]
    length = number.reshape(plan.devices, -1).sum(axis=1)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))
    place = rank - start.at[_device(experts, plan)].get(mode="clip")
    return _Queues(experts, order, place, start, length)


def _device(experts: jax.Array, plan: _Plan) -> jax.Array:
    """P for none."""
    return experts // (plan.experts // plan.devices)


def _one_round(
    number: Any, x: jax.Array, gates: jax.Array, shards: Any, queues: _Queues, plan: _Plan
) -> jax.Array:
    """What round `number`'s rows add to y[T, D], in f32."""
    choices, local = queues.order.shape[0], plan.experts // plan.devices
    width = choices // x.shape[0]
    send = partial(all_to_all_rows, axes=plan.layout.axes("expert"), layout=plan.layout)

    at = number * plan.rows + jnp.arange(plan.rows)[None]
    place = jnp.minimum(queues.start[:, None] + at, choices - 1)
    leaving = jnp.where(at < queues.length[:, None], queues.order[place], choices).reshape(-1)
    place = queues.place - number * plan.rows
    slots = _device(queues.experts, plan) * plan.rows + place
    waits = (place < 0) | (place >= plan.rows) | (queues.experts == plan.experts)
    slots = jnp.where(waits, leaving.shape[0], slots)

    rows = spread(x, leaving, slots, width)
    weight = spread(gates[:, None], leaving, slots, 1)
    expert = queues.experts.at[leaving].get(mode="clip") % local
    expert = jnp.where(leaving < choices, expert, local)
    rows, weight, expert = send((rows, weight, expert))
    y = _compute(rows, expert, weight[:, 0], shards, plan).astype(x.dtype)
    return collect(send(y), leaving, slots, width)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _rounds(
    x: jax.Array, gates: jax.Array, shards: Any, queues: _Queues, plan: _Plan
) -> tuple[jax.Array, jax.Array]:
    weights, plan = _gather(shards, x.dtype, plan)

    def one(number: jax.Array, y: jax.Array) -> jax.Array:
        return y + _one_round(number, x, gates, weights, queues, plan)

    rounds = _count(queues, plan)
    return lax.fori_loop(0, rounds, one, jnp.zeros(x.shape, jnp.float32)), rounds


def _rounds_forward(x, gates, shards, queues, plan):
    return _rounds(x, gates, shards, queues, plan), (x, gates, shards, queues)


def _rounds_backward(plan, residuals, cotangents):
    (x, gates, shards, queues), (dy, _) = residuals, cotangents
    weights, whole = _gather(shards, x.dtype, plan)

    def one(number: jax.Array, sums: Any) -> Any:
        def y(x, gates, weights):
            return _one_round(number, x, gates, weights, queues, whole)

        _, backward = jax.vjp(y, x, gates, weights)
        return jax.tree.map(lambda total, part: total + part, sums, backward(dy))

    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), (x, gates, weights))
    dx, dgates, dweights = lax.fori_loop(0, _count(queues, plan), one, zeros)
    dshards = tuple(
        scatter_gradient(dweight, axes, shard.dtype, plan.layout)
        for dweight, axes, shard in zip(dweights, plan.axes, shards, strict=True)
    )
    return dx.astype(x.dtype), dgates, dshards, None


_rounds.defvjp(_rounds_forward, _rounds_backward)


def _gather(shards: Any, dtype: Any, plan: _Plan) -> tuple[Any, _Plan]:
    """The weights, gathered once for all rounds, and the plan that takes them so. They are held in
    f32, since the sums of their gradients are; what travels and is multiplied is in `dtype`.
    """
    weights = tuple(
        gather_weight(shard, axes, dtype, plan.layout).astype(jnp.float32)
        for shard, axes in zip(shards, plan.axes, strict=True)
    )
    return weights, replace(plan, axes=((),) * len(shards))


def _count(queues: _Queues, plan: _Plan) -> jax.Array:
    """Rounds until the longest queue of all devices that meet in them is empty."""
    longest = all_reduce_max(jnp.max(queues.length), plan.layout.axes("expert"), plan.layout)
    return -(-longest // plan.rows)
