"""Exact attention in blocks with an online softmax (arXiv 2205.14135, 2307.08691): memory linear in
the sequence, hidden block pairs skipped. `block_kernel` is what `sharding/context.py` calls on
whatever queries and keys meet on a device; the VJP is there.

What a query sees follows from the tokens' true positions and documents, never from their place in
the array: key visible to query when both are in the same document (segment, never one < 0, which is
padding), and causality and the window allow it. So packed and permuted rows, and keys of another
device, are just data.

Shapes: B sequences, S tokens, K kv heads, G query heads per kv head, H = K·G, D width of a head's
queries and keys, E of its values, q and k block lengths Q.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...sharding.context import BlockKernel

LARGEST_BLOCK = 256
HIDDEN = -1e30
"""Stands in for minus infinity: finite, so that rows that see nothing give zeros and no NaN."""


@dataclass(frozen=True)
class Mask:
    """What hides a key from a query of the same document, and the softcap on scores.

    window: tokens a query sees, itself included. softcap: scores become c·tanh(score/c)
    (2408.00118).
    """

    causal: bool = True
    window: int | None = None
    softcap: float | None = None


class Tokens(NamedTuple):
    """Where tokens stand: position in the document and document in the row, each [B, Q]."""

    positions: jax.Array
    segments: jax.Array


def block_kernel(mask: Mask, consecutive: int, largest: int | None = None) -> BlockKernel:
    """softmax(q·k/sqrt(D) under `mask`)·v and its gradients, the softmax in f32; query head h
    attends with kv head h // G. Queries with segment < 0 give zeros.

    q_at and k_at are `Tokens`. consecutive: tokens that follow one another, and so can be hidden
    together; they are cut into the fewest blocks of at most `largest`, by default LARGEST_BLOCK.
    """
    size = -(-consecutive // -(-consecutive // (largest or LARGEST_BLOCK)))
    return BlockKernel(
        partial(_forward, mask=mask, size=size), partial(_backward, mask=mask, size=size)
    )


def attend_to(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_at: Tokens,
    k_at: Tokens,
    mask: Mask,
    sink: jax.Array | None = None,
) -> jax.Array:
    """The same softmax of queries q [B, S, H, D] over other tokens' k [B, K, T, D], v [B, K, T, E],
    which stand at `k_at` [B or 1, T], and over a score sink[H] whose value is zero: decoding's.
    Scores [B, H, S, T] exist whole; not meant to be differentiated.
    """
    score, visible = _scores(_by_head(q, k.shape[1]), k, q_at, k_at, mask)
    if sink is not None:
        extra = _by_head(jnp.broadcast_to(sink[:, None], (*q.shape[:3], 1)), k.shape[1])
        score = jnp.concatenate([score, extra], axis=-1)
    weight = jnp.where(visible, jax.nn.softmax(score)[..., : k.shape[2]], 0.0)
    o = jnp.matmul(weight.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return _by_token(o.astype(q.dtype), q.shape[1])


def _cut(a: jax.Array, size: int, fill: int = 0) -> jax.Array:
    """[B, S, ...] -> [blocks, B, Q, ...], Q = size; `fill` pads the last block."""
    padding = -a.shape[1] % size
    a = jnp.pad(a, [(0, 0), (0, padding)] + [(0, 0)] * (a.ndim - 2), constant_values=fill)
    return jnp.moveaxis(a.reshape(a.shape[0], -1, size, *a.shape[2:]), 1, 0)


def _cut_places(at: Tokens, size: int) -> Tokens:
    return Tokens(_cut(at.positions, size), _cut(at.segments, size, fill=-1))


def _join(a: jax.Array, size: int, tokens: int) -> jax.Array:
    """[blocks, B, K, G·Q, D] -> [B, S, H, D], S = tokens: undoes `_by_head(_cut(a, size))`."""
    a = jnp.moveaxis(_by_token(a, size), 0, 1)
    return a.reshape(a.shape[0], -1, *a.shape[3:])[:, :tokens]


def _by_head(a: jax.Array, kv_heads: int) -> jax.Array:
    """[..., Q, heads, D] -> [..., K, G·Q, D]."""
    *outer, tokens, heads, size = a.shape
    a = a.reshape(*outer, tokens, kv_heads, heads // kv_heads, size)
    return jnp.moveaxis(a, -4, -2).reshape(*outer, kv_heads, -1, size)


def _by_token(a: jax.Array, tokens: int) -> jax.Array:
    """[..., K, G·Q, D] -> [..., Q, heads, D]."""
    *outer, kv_heads, _, size = a.shape
    a = a.reshape(*outer, kv_heads, -1, tokens, size)
    return jnp.moveaxis(a, -2, -4).reshape(*outer, tokens, -1, size)


def _forward(q, k, v, q_at: Tokens, k_at: Tokens, *, mask: Mask, size: int):
    """`BlockKernel.forward`: one query block after another over all key blocks."""
    tokens, kv_heads = q.shape[1], k.shape[2]
    q, k, v = (_by_head(_cut(a, size), kv_heads) for a in (q, k, v))
    q_at, k_at = _cut_places(q_at, size), _cut_places(k_at, size)
    accumulate = partial(_accumulate, mask=mask)

    def one_query_block(_, query):
        q, q_at, sees = query

        def one_key_block(state, key):
            *key, visible = key
            return lax.cond(visible, accumulate, lambda state, *_: state, state, q, q_at, key), None

        row, out = (*q.shape[:-1], 1), (*q.shape[:-1], v.shape[-1])
        state = jnp.zeros(out, jnp.float32), jnp.full(row, HIDDEN), jnp.zeros(row, jnp.float32)
        (o, top, total), _ = lax.scan(one_key_block, state, (k, v, k_at, sees))
        total = jnp.where(total > 0, total, 1.0)
        return None, (o / total, top + jnp.log(total))

    queries = q, q_at, _visible_pairs(q_at, k_at, mask)
    _, (o, logsumexp) = lax.scan(one_query_block, None, queries)
    return _join(o, size, tokens), _join(logsumexp, size, tokens)[..., 0]


def _backward(q, k, v, q_at: Tokens, k_at: Tokens, do, logsumexp, inner, *, mask: Mask, size: int):
    """`BlockKernel.backward`: one key block after another over all query blocks."""
    (tokens, keys), kv_heads = (q.shape[1], k.shape[1]), k.shape[2]
    rows = logsumexp[..., None], inner[..., None]
    q, do, *rows, k, v = (_by_head(_cut(a, size), kv_heads) for a in (q, do, *rows, k, v))
    q_at, k_at = _cut_places(q_at, size), _cut_places(k_at, size)
    queries = (q, do, *rows, q_at)
    block = jnp.arange(q.shape[0])

    def one_key_block(dq, key):
        *key, seen_by = key

        def one_query_block(state, query):
            i, visible, query = query
            dq, dk, dv = state
            differentiate = partial(_block_gradients, mask=mask)
            shapes = jax.eval_shape(differentiate, query, key)
            zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
            dq_i, dk_i, dv_i = lax.cond(visible, differentiate, lambda *_: zeros, query, key)
            return (dq.at[i].add(dq_i), dk + dk_i, dv + dv_i), None

        k, v, _ = key
        state = dq, jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
        (dq, dk, dv), _ = lax.scan(one_query_block, state, (block, seen_by, queries))
        return dq, (dk, dv)

    dq = jnp.zeros(q.shape, jnp.float32)
    seen_by = _visible_pairs(q_at, k_at, mask).T
    dq, (dk, dv) = lax.scan(one_key_block, dq, (k, v, k_at, seen_by))
    return _join(dq, size, tokens), _join(dk, size, keys), _join(dv, size, keys)


def _accumulate(state, q, q_at: Tokens, key, *, mask: Mask):
    """One key block (k, v, k_at) into the online softmax of one query block.

    state: (o, running max, running sum) in f32.
    """
    o, top, total = state
    k, v, k_at = key
    score, visible = _scores(q, k, q_at, k_at, mask)
    new_top = jnp.maximum(top, jnp.max(score, axis=-1, keepdims=True))
    weight = jnp.where(visible, jnp.exp(score - new_top), 0.0)
    shrink = jnp.exp(top - new_top)
    o = o * shrink + jnp.matmul(weight.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return o, new_top, total * shrink + jnp.sum(weight, axis=-1, keepdims=True)


def _block_gradients(query, key, *, mask: Mask):
    """dq, dk, dv in f32 that one pair of blocks adds.

    query: (q, do, logsumexp, sum(o·do) per row, q_at). key: (k, v, k_at).
    """
    q, do, logsumexp, inner, q_at = query
    k, v, k_at = key
    score, visible = _scores(q, k, q_at, k_at, mask)
    weight = jnp.where(visible, jnp.exp(score - logsumexp), 0.0)
    dweight = jnp.matmul(do, v.mT, preferred_element_type=jnp.float32)
    dscore = weight * (dweight - inner) * q.shape[-1] ** -0.5
    if mask.softcap:
        dscore *= jnp.where(visible, 1.0 - (score / mask.softcap) ** 2, 0.0)
    dscore, weight = dscore.astype(q.dtype), weight.astype(q.dtype)
    dq = jnp.matmul(dscore, k, preferred_element_type=jnp.float32)
    dk = jnp.matmul(dscore.mT, q, preferred_element_type=jnp.float32)
    dv = jnp.matmul(weight.mT, do, preferred_element_type=jnp.float32)
    return dq, dk, dv


def _scores(q, k, q_at: Tokens, k_at: Tokens, mask: Mask):
    """Scaled, capped, masked scores [B, K, G·Q, Q] in f32, and which of them are visible."""
    score = jnp.matmul(q, k.mT, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    if mask.softcap:
        score = mask.softcap * jnp.tanh(score / mask.softcap)
    q_position, k_position = q_at.positions[:, :, None], k_at.positions[:, None, :]
    segment = q_at.segments[:, :, None]
    visible = (segment == k_at.segments[:, None, :]) & (segment >= 0)
    if mask.causal:
        visible &= k_position <= q_position
    if mask.window:
        visible &= q_position - k_position < mask.window
        if not mask.causal:
            visible &= k_position - q_position < mask.window
    visible = jnp.tile(visible, (1, q.shape[2] // visible.shape[1], 1))[:, None]
    return jnp.where(visible, score, HIDDEN), visible


def _visible_pairs(q_at: Tokens, k_at: Tokens, mask: Mask) -> jax.Array:
    """[query blocks, key blocks]: whether any key of one can be visible to any query of the other.

    q_at, k_at: of all blocks, [blocks, B, Q]. Never False where one is visible. Bounds only:
    documents by their ranges, causality by the last query and the first key in (document, position)
    order, the window by positions where each block lies in a single document.
    """
    q_ends = jax.tree.map(lambda a: a[:, None], _ends(q_at))
    k_ends = jax.tree.map(lambda a: a[None, :], _ends(k_at))
    (q_first, q_first_at), (q_last, q_last_at) = q_ends
    (k_first, k_first_at), (k_last, k_last_at) = k_ends
    possible = (q_first <= k_last) & (k_first <= q_last)
    if mask.causal:
        possible &= (k_first < q_last) | ((k_first == q_last) & (k_first_at <= q_last_at))
    if mask.window:
        single = (q_first == q_last) & (k_first == k_last)
        possible &= ~single | (q_first_at - k_last_at < mask.window)
        if not mask.causal:
            possible &= ~single | (k_first_at - q_last_at < mask.window)
    return jnp.any(possible, axis=-1)


def _ends(at: Tokens):
    """First and last (segment, position) of each row of each block, padding left out; [blocks, B].

    A row of padding alone has first > last, so its ranges meet nothing.
    """
    segments, positions = at.segments, at.positions
    real = segments >= 0
    big = jnp.iinfo(jnp.int32).max
    first = jnp.min(jnp.where(real, segments, big), axis=-1)
    last = jnp.max(jnp.where(real, segments, -1), axis=-1)
    in_first, in_last = segments == first[..., None], segments == last[..., None]
    first_at = jnp.min(jnp.where(in_first, positions, big), axis=-1)
    last_at = jnp.max(jnp.where(in_last, positions, -1), axis=-1)
    return (first, first_at), (last, last_at)
