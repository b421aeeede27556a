"""The vocabulary's two ends: embedding, and a cross entropy whose full logits never exist.

Both tables are cut over `pipe` and `tensor` by rows (Megatron, arXiv 1909.08053; over pipe:
2411.05288). A device works with its own columns of the logits; one maximum and one sum over these
axes make the softmax whole. Padding rows of
a table (stored vocabulary is a multiple of `model.vocab_multiple`) are outside the model: their
logits are minus infinity, their gradients zero. Shapes: B sequences, S tokens, D width, T tokens of
a chunk, V stored vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ..sharding.collectives import all_reduce, all_reduce_max, axis_index
from ..sharding.layout import Layout
from ..sharding.linear import fused_linear, local_rows, row_products

LOGITS_AT_ONCE = 2**22
"""f32 logits that exist at once on a device, 16 MiB; but those of SMALLEST_CHUNK tokens always."""

SMALLEST_CHUNK = 256
"""Tokens of a chunk that are worth reading the table and updating its gradient for."""


class Loss(NamedTuple):
    """How tokens are scored. vocab_size: of the model, padding left out."""

    vocab_size: int
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    softcap: float | None = None


def cross_entropy_share(
    x: jax.Array,
    table: nnx.Param,
    targets: jax.Array,
    weights: jax.Array,
    layout: Layout,
    loss: Loss,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """This device's share of the loss of x[B, S_{context,tensor}, D] against targets[B, S_context].

    weights[B, S_context] f32: weight of each target; 0 where there is none. Returns a scalar share,
    differentiable, and sums by name, also shares, of quantities to log: `loss`, the negative
    log-likelihood in nats; `z_loss` and `smoothing_loss` where those are on. Per token
        objective = (1-ε)·nll + ε·mean over the vocabulary of -log p + z·logsumexp²
    (label smoothing 1512.00567; z-loss 2204.02311). Every device that holds rows computes the same
    value, hence its part of it.
    """
    rows = {"target": targets, "weight": weights}
    consume = partial(_score, layout=layout, loss=loss)
    return fused_linear(x, table, rows, layout, consume, tokens_at_once(table.shape[0]))


def tokens_at_once(columns: int) -> int:
    """Tokens of a chunk whose logits have `columns` columns on a device."""
    return max(SMALLEST_CHUNK, LOGITS_AT_ONCE // columns)


def last_logits(
    x: jax.Array, table: nnx.Param, layout: Layout, vocab_size: int, softcap: float | None
) -> jax.Array:
    """Logits [B, vocab_size] in f32 of one token a row, x[B, D]; padding left out, whole on every
    tensor rank.
    """
    return _cap(row_products(x, table, layout)[:, :vocab_size], softcap)


def _cap(logits: jax.Array, softcap: float | None) -> jax.Array:
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def _score(logits: jax.Array, rows: dict[str, jax.Array], *, layout: Layout, loss: Loss):
    """This device's columns of the logits, [T, V] f32 -> share, d(objective)/d(logits), sums."""
    columns, axes = logits.shape[1], layout.axes("vocab")
    weight = rows["weight"][:, None]
    capped = _cap(logits, loss.softcap)
    column = axis_index(axes, layout) * columns + jnp.arange(columns)[None, :]
    real = column < loss.vocab_size
    capped = jnp.where(real, capped, -jnp.inf)

    top = all_reduce_max(jnp.max(capped, axis=1, keepdims=True), axes, layout)
    exp = jnp.exp(capped - top)
    at_target = jnp.arange(columns)[None, :] == local_rows(rows["target"], columns, layout)[:, None]
    parts = [exp, jnp.where(at_target, capped, 0.0)]
    if loss.label_smoothing:
        parts.append(jnp.where(real, capped, 0.0))
    local = [jnp.sum(part, axis=1, keepdims=True) for part in parts]
    total, target_logit, *logit_sum = all_reduce(local, axes, layout)
    logsumexp = top + jnp.log(total)
    nll = logsumexp - target_logit
    objective, sums = nll, {"loss": nll}
    p_factor, smoothing = 1.0, loss.label_smoothing
    if smoothing:
        sums["smoothing_loss"] = smoothing * (target_logit - logit_sum[0] / loss.vocab_size)
        objective += sums["smoothing_loss"]
    if loss.z_loss:
        sums["z_loss"] = loss.z_loss * logsumexp**2
        objective += sums["z_loss"]
        p_factor += 2.0 * loss.z_loss * logsumexp

    dlogits = p_factor * (exp / total) - jnp.where(at_target, 1.0 - smoothing, 0.0)
    dlogits -= jnp.where(real, smoothing / loss.vocab_size, 0.0)
    if loss.softcap is not None:
        dlogits *= jnp.where(real, 1.0 - (capped / loss.softcap) ** 2, 0.0)
    once = weight / layout.size(axes)
    share, *parts = (jnp.sum(a * once) for a in (objective, *sums.values()))
    return share, dlogits * weight, dict(zip(sums, parts, strict=True))
