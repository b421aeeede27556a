"""Attention over a sequence that is cut over `context`: queries stay, keys and values come to them.

One way of moving, with two ends. Among each `ulysses` neighbours tokens are exchanged for heads
(DeepSpeed Ulysses, arXiv 2309.14509); across these groups keys and values go round a ring (Ring
Attention, 2310.01889). Groups of one are the plain ring, one group is plain Ulysses, anything
between is USP (2405.07719). `all_gather` (2407.21783) gathers keys and values instead. What a query
sees follows from its token's true place, so rows may be cut in any order: dealt out in zigzag,
causal work is the same on all devices.

What meets is the caller's: a `BlockKernel` of local queries over keys of any device. Shapes: P
devices along `context`, N groups of them, B sequences, S tokens, H query heads, K kv heads, D width
of a head's queries and keys, E of its values. q[B, S_context, H, D] is cut in the order of
`token_at`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .collectives import all_gather, all_to_all, axis_index, reduce_scatter, shift
from .layout import Layout
from .traffic import ALL_GATHER, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER, LayerRuns, Traffic, ring

TOKENS, HEADS = 1, 2
"""Dims of q, k and v."""


class BlockKernel(NamedTuple):
    """Attention of queries q[B, Q, H, D] over keys k[B, T, K, D] and values v[B, T, K, E] that may
    be only some of those they see; q_at, k_at: trees of [B, Q] and [B, T], where they stand.

    forward: (q, k, v, q_at, k_at) -> o[B, Q, H, E] and logsumexp[B, Q, H] of the scores, in f32;
    where a query sees none of them o is zero and logsumexp a finite number below all others.
    backward: (q, k, v, q_at, k_at, do, logsumexp, inner) -> dq, dk, dv in f32; logsumexp over all
    that a query sees, inner[B, Q, H] the sum of o·do over E.
    """

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def token_at(place: Any, tokens: int, layout: Layout) -> Any:
    """The number in its row of S = `tokens` of the token at each `place` of the row as devices hold
    it; an array of NumPy or JAX.

    A row is cut as it stands, or dealt out in zigzag: of 2N chunks group r gets r and 2N-1-r.
    """
    chunks = layout.resolved.chunks
    length = tokens // chunks
    group, second = place // length // 2, place // length % 2
    return (group + second * (chunks - 1 - 2 * group)) * length + place % length


def consecutive(tokens: int, layout: Layout) -> int:
    """How many tokens follow one another in what a group holds, of which a device has `tokens`: a
    block of more would be near none of its ends.
    """
    return tokens * layout.resolved.ulysses // (1 if layout.resolved.chunks == 1 else 2)


def causal_pairs(tokens: int, layout: Layout) -> np.ndarray:
    """[P]: (query, key) pairs of one causal row of S = `tokens` that each device computes, of all
    heads together one pair; the devices of a group share its pairs by heads.
    """
    group = layout.resolved.ulysses
    at = token_at(np.arange(tokens), tokens, layout).reshape(layout.size("context") // group, -1)
    return np.repeat((at + 1).sum(axis=1) / group, group)


def gather_tokens(tree: Any, layout: Layout) -> Any:
    """A[B, S_context, ..] -> A[B, S, ..] for every leaf of a tree. Sends (P-1)/P·n."""
    return jax.tree.map(lambda a: all_gather(a, "context", TOKENS, layout), tree)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    at: Any,
    kernel: BlockKernel,
    layout: Layout,
    sink: jax.Array | None = None,
) -> jax.Array:
    """q[B, S_context, H, D], k[B, S_context, K, D], v[B, S_context, K, E] -> o[B, S_context, H, E].
    at: of all tokens, from `gather_tokens`. sink[H] f32: score of one more key for every query,
    whose value is zero.

    With U neighbours in a group, q and o send (U-1)/U of their bytes, and so do k and v, first
    repeated to a multiple of U heads; all of it once more backward. Then, n the bytes of what a
    group's device now holds of k and v, the ring sends (N-1)·n forward, and (N-1)·n + N·n in f32
    backward; `all_gather` as much as a ring but for N-1 of the last N.
    """
    group = layout.resolved.ulysses
    copies = math.lcm(k.shape[HEADS], group) // k.shape[HEADS]
    exchange = partial(all_to_all, axis="context", group=group, layout=layout)
    k, v = (jnp.repeat(a, copies, axis=HEADS) for a in (k, v))
    q, k, v = exchange((q, k, v), split=HEADS, join=TOKENS)
    if sink is not None:
        heads = q.shape[HEADS]
        first = axis_index("context", layout) % group * heads
        sink = lax.dynamic_slice_in_dim(sink, first, heads)
    o: Any = _attend(q, k, v, sink, at, kernel, layout)
    return exchange(o, split=TOKENS, join=HEADS)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend(q, k, v, sink, at, kernel: BlockKernel, layout: Layout):
    """Of a group's tokens S/N. Residuals are what the device holds, never another's k and v."""
    return _attend_forward(q, k, v, sink, at, kernel, layout)[0]


def _attend_forward(q, k, v, sink, at, kernel, layout):
    residuals = q, k, v, sink, at
    # inside a scan over layers, all that depends on loop constants alone is hoisted and stacked:
    # without the barrier the masks of all hops and blocks, O(S^2) bytes
    q, k, v, sink, at = lax.optimization_barrier(residuals)
    forward = _gathered_forward if layout.config.context == "all_gather" else _ring_forward
    o, logsumexp = forward(q, k, v, at, kernel, layout)
    if sink is not None:
        o, logsumexp = _merge((o, logsumexp), (jnp.zeros_like(o), sink[None, None]))
    # named where the VJP takes them: a policy that saves them skips the pass and all that it sends
    o = checkpoint_name(o.astype(q.dtype), "attention.context")
    logsumexp = checkpoint_name(logsumexp, "attention.logsumexp")
    return o, (*residuals, o, logsumexp)


def _attend_backward(kernel, layout, residuals, do):
    q, k, v, sink, at, o, logsumexp, do = lax.optimization_barrier((*residuals, do))
    inner = jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), axis=-1)
    backward = _gathered_backward if layout.config.context == "all_gather" else _ring_backward
    grads = backward(q, k, v, at, (do, logsumexp, inner), kernel, layout)
    dsink = None
    if sink is not None:
        dsink = -jnp.sum(jnp.exp(sink[None, None] - logsumexp) * inner, axis=(0, 1))
    grads = (grad.astype(a.dtype) for grad, a in zip(grads, (q, k, v), strict=True))
    return *grads, dsink, None


_attend.defvjp(_attend_forward, _attend_backward)


def _ring_forward(q, k, v, at, kernel, layout):
    mine = _part(at, 0, layout)

    def add(total, hop, kv):
        return _merge(total, kernel.forward(q, *kv, mine, _part(at, hop, layout)))

    following = _send((k, v), layout)
    return _go_round(add, kernel.forward(q, k, v, mine, mine), following, layout)


def _ring_backward(q, k, v, at, rest, kernel, layout):
    mine = _part(at, 0, layout)

    def add(total, hop, kv):
        dq, dkv = total
        dkv = _send(dkv, layout)  # the sum so far of the keys that are here now
        more, *more_dkv = kernel.backward(q, *kv, mine, _part(at, hop, layout), *rest)
        return dq + more, jax.tree.map(jnp.add, dkv, more_dkv)

    following = _send((k, v), layout)
    dq, *dkv = kernel.backward(q, k, v, mine, mine, *rest)
    dq, dkv = _go_round(add, (dq, dkv), following, layout)
    return dq, *_send(dkv, layout)


def _go_round(add, total, kv, layout: Layout):
    """`total = add(total, hop, kv)` at hops 1…N-1, where kv is that of the group `hop` places
    behind. It is sent on before it is used.
    """
    groups = _groups(layout)

    def one_hop(state, hop):
        total, kv = state
        following = _send(kv, layout)
        return (add(total, hop, kv), following), None

    if groups > 2:
        (total, kv), _ = lax.scan(one_hop, (total, kv), jnp.arange(1, groups - 1))
    return add(total, groups - 1, kv) if groups > 1 else total


def _merge(one, other):
    """Softmaxes over two sets of keys, (o, logsumexp) each in f32, as one over both."""
    total = jnp.logaddexp(one[1], other[1])
    one, other = (o * jnp.exp(logsumexp - total)[..., None] for o, logsumexp in (one, other))
    return one + other, total


def _gathered_forward(q, k, v, at, kernel, layout):
    return kernel.forward(q, *gather_tokens((k, v), layout), _part(at, 0, layout), at)


def _gathered_backward(q, k, v, at, rest, kernel, layout):
    k, v = gather_tokens((k, v), layout)
    dq, *dkv = kernel.backward(q, k, v, _part(at, 0, layout), at, *rest)
    return dq, *(reduce_scatter(a, "context", TOKENS, layout) for a in dkv)


def _groups(layout: Layout) -> int:
    return layout.size("context") // layout.resolved.ulysses


def _send(tree, layout: Layout):
    """To the same place in the next group."""
    return shift(tree, "context", layout.resolved.ulysses, layout)


def _part(at, hops: Any, layout: Layout):
    """Of every A[B, S], the tokens of the group that many hops behind this one: [B, S/N]."""
    groups = _groups(layout)
    group = (axis_index("context", layout) // layout.resolved.ulysses - hops) % groups

    def one(a: jax.Array) -> jax.Array:
        length = a.shape[TOKENS] // groups
        return lax.dynamic_slice_in_dim(a, group * length, length, TOKENS)

    return jax.tree.map(one, at)


def sent(
    heads: int, kv_heads: int, width: int, value_width: int, runs: LayerRuns, layout: Layout
) -> Iterator[Traffic]:
    """What `attend` sends for one layer in a step, of all heads: P devices in N groups of U.

    U neighbours exchange q, k, v and o forward and their gradients backward, k and v repeated to a
    multiple of U heads, (U-1)/U of what each holds (Ulysses: arXiv 2309.14509). Across groups, n
    the bytes of k and v that a device then holds, a ring sends (N-1) n forward, the same backward,
    and N n of their gradients, in f32 (2310.01889). Gathered, they are sent as often, but the
    gradients only (P-1) n (2407.21783). Recomputation sends what is forward again, but for a ring
    and a gather whose o and logsumexp are saved.
    """
    axes, tensor = ["context"], layout.size("tensor")
    devices, neighbours = layout.size("context"), layout.resolved.ulysses
    heads, kv_heads = heads // tensor, math.lcm(kv_heads // tensor, neighbours)
    tokens, both = runs.rows * runs.seq_len, width + value_width
    exchanged = (heads + kv_heads) * both * tokens // devices * runs.itemsize
    exchanges = exchanged * (neighbours - 1) / neighbours * (2 * runs.passes + runs.again)
    yield Traffic("Ulysses", ALL_TO_ALL, ("context",), exchanges)

    held = kv_heads // neighbours * both * tokens  # elements of k and v, all groups
    core_is_saved = {"attention.context", "attention.logsumexp"} <= runs.saved
    forward = runs.passes + (0 if core_is_saved else runs.again)
    there, back = held * runs.itemsize * (forward + runs.passes), held * 4 * runs.passes
    if layout.config.context == "all_gather":
        yield ring("keys and values", ALL_GATHER, axes, there, layout)
        yield ring("their gradients", REDUCE_SCATTER, axes, back, layout)
    else:
        groups = devices // neighbours
        hops = there * (groups - 1) + (back * groups if groups > 1 else 0)
        yield Traffic("keys and values", PERMUTE, ("context",), hops / groups)
