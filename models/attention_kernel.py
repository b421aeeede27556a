"""Exact attention in blocks with an online softmax (arXiv 2205.14135, 2307.08691): memory linear in
the sequence, hidden block pairs skipped, gradients from its own VJP whose residuals are q, k, v, o
and the logsumexp.

What a query sees follows from the tokens' true positions and documents, never from their place in
the array: key visible to query when both are in the same document (segment, never one < 0, which is
padding), and causality and the window allow it. So packed rows, and later permuted ones, are just
data.

Shapes: B sequences, S tokens, K kv heads, G query heads per kv head, H = K·G, D head_dim, q and k
block lengths Q.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

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


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, segments: jax.Array, mask: Mask
) -> jax.Array:
    """softmax(q·k/sqrt(D) under `mask`)·v for q [B, S, H, D] and k, v [B, S, K, D]; positions,
    segments [B, S].

    Query head h attends with kv head h // G. Softmax in f32; the result has q's dtype. Tokens with
    segment < 0 give zeros.
    """
    batch, tokens, heads, _ = q.shape
    kv_heads = k.shape[2]
    blocks = -(-tokens // LARGEST_BLOCK)
    size = -(-tokens // blocks)
    padding = blocks * size - tokens

    def cut(a, fill=0):  # [B, S, ...] -> [blocks, B, Q, ...]
        a = jnp.pad(a, [(0, 0), (0, padding)] + [(0, 0)] * (a.ndim - 2), constant_values=fill)
        return jnp.moveaxis(a.reshape(batch, blocks, size, *a.shape[2:]), 1, 0)

    where = Tokens(cut(positions), cut(segments, fill=-1))
    q, k, v = (_by_head(cut(a), kv_heads) for a in (q, k, v))
    o = jnp.moveaxis(_by_token(_attention(q, k, v, where, mask), size), 0, 1)
    return o.reshape(batch, blocks * size, heads, -1)[:, :tokens]


def attend_to(
    q: jax.Array, k: jax.Array, v: jax.Array, q_at: Tokens, k_at: Tokens, mask: Mask
) -> jax.Array:
    """The same softmax of queries q [B, S, H, D] over other tokens' k, v [B, K, T, D], which stand
    at `k_at` [B or 1, T]: decoding's. Scores [B, H, S, T] exist whole; not meant to be
    differentiated.
    """
    score, visible = _scores(_by_head(q, k.shape[1]), k, q_at, k_at, mask)
    weight = jnp.where(visible, jax.nn.softmax(score), 0.0)
    o = jnp.matmul(weight.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return _by_token(o.astype(q.dtype), q.shape[1])


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


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q, k, v, where: Tokens, mask: Mask):
    """q [blocks, B, K, G·Q, D], k, v [blocks, B, K, Q, D] -> o like q."""
    return _attention_forward(q, k, v, where, mask)[0]


def _attention_forward(q, k, v, where, mask):
    # inside a scan over layers, all that depends on loop constants alone is hoisted and stacked:
    # without the barrier the masks of every block pair, O(S^2) bytes
    q, k, v, where = lax.optimization_barrier((q, k, v, where))
    accumulate = partial(_accumulate, mask=mask)

    def one_query_block(_, query):
        q, q_at, sees = query

        def one_key_block(state, key):
            *key, visible = key
            return lax.cond(visible, accumulate, lambda state, *_: state, state, q, q_at, key), None

        row = (*q.shape[:-1], 1)
        state = jnp.zeros(q.shape, jnp.float32), jnp.full(row, HIDDEN), jnp.zeros(row, jnp.float32)
        (o, top, total), _ = lax.scan(one_key_block, state, (k, v, where, sees))
        total = jnp.where(total > 0, total, 1.0)
        return None, ((o / total).astype(q.dtype), top + jnp.log(total))

    _, (o, logsumexp) = lax.scan(one_query_block, None, (q, where, _visible_pairs(where, mask)))
    # named where the VJP takes them, so that a policy may save them and skip this whole pass
    o = checkpoint_name(o, "attention.context")
    logsumexp = checkpoint_name(logsumexp, "attention.logsumexp")
    return o, (q, k, v, where, o, logsumexp)


def _attention_backward(mask, residuals, do):
    q, k, v, where, o, logsumexp, do = lax.optimization_barrier((*residuals, do))
    inner = jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), axis=-1, keepdims=True)
    queries = (q, do, logsumexp, inner, where)
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
        return dq, (dk.astype(k.dtype), dv.astype(v.dtype))

    dq = jnp.zeros(q.shape, jnp.float32)
    dq, (dk, dv) = lax.scan(one_key_block, dq, (k, v, where, _visible_pairs(where, mask).T))
    return dq.astype(q.dtype), dk, dv, None


_attention.defvjp(_attention_forward, _attention_backward)


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


def _visible_pairs(at: Tokens, mask: Mask) -> jax.Array:
    """[query blocks, key blocks]: whether any key of one can be visible to any query of the other.

    at: of all blocks, [blocks, B, Q]. Never False where one is visible. Bounds only: documents by
    their ranges, causality by the last query and the first key in (document, position) order, the
    window by positions where each block lies in a single document.
    """
    first, last = _ends(at)
    (q_first, q_first_at), (q_last, q_last_at) = jax.tree.map(lambda a: a[:, None], (first, last))
    (k_first, k_first_at), (k_last, k_last_at) = jax.tree.map(lambda a: a[None, :], (first, last))
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
