"""Gradients and sums over the micro-batches of a step: one behind the other, or as a pipeline's
schedule has them pass the stages. Shapes: G micro-batches, B sequences, S tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..models.batch import Batch
from ..models.transformer import (
    Layers,
    Transformer,
    join,
    split,
)
from ..sharding.gradients import scatter_gradients
from ..sharding.layout import Layout, specs
from ..sharding.pipeline.executor import Mark, Stages, Totals, run_schedule
from ..sharding.pipeline.schedules import Schedule, forward_schedule
from .assembly import Piece, forward_share
from .config import Config


def add_up_gradients(
    params: Transformer,
    pieces: Piece,
    stages: Stages,
    config: Config,
    layout: Layout,
    mark: Mark | None,
) -> tuple[Transformer, dict[str, jax.Array], jax.Array | None]:
    """Local: gradients and sums to log, added up over micro-batches [G, ...]; and what `mark` makes
    of each one's gradients, [G, leaf].
    """

    def scatter(grads: Any) -> Any:
        before, after = specs(grads, layout.param_spec), specs(grads, layout.accumulator_spec)
        return scatter_gradients(grads, before, after, layout)

    schedule = config.pipeline()
    if schedule is None:
        return _one_by_one(params, pieces, stages, scatter, mark)
    ends, layers = split(params)
    return _by_schedule(schedule, ends, layers, pieces, stages, layout, scatter, mark)


def _one_by_one(
    params: Transformer,
    pieces: Piece,
    stages: Stages,
    scatter: Callable[[Any], Any],
    mark: Mark | None,
) -> Any:
    def share(params: Transformer, piece: Piece) -> Any:
        return forward_share(stages, *split(params), piece)

    @jax.jit  # so that its shapes and the scan below trace the model once
    def one_microbatch(params: Transformer, piece: Piece) -> Any:
        grads, sums = jax.grad(share, has_aux=True)(params, piece)
        return (scatter(grads), sums), mark(grads) if mark else None

    def add(total: Any, piece: Piece) -> Any:
        one, marks = one_microbatch(params, piece)
        return jax.tree.map(jnp.add, total, one), marks

    one, _ = jax.eval_shape(one_microbatch, params, jax.tree.map(lambda a: a[0], pieces))
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), one)
    (grads, sums), marks = lax.scan(add, zeros, pieces)
    return grads, sums, marks


def _by_schedule(
    schedule: Schedule,
    ends: Transformer,
    layers: Layers,
    pieces: Piece,
    stages: Stages,
    layout: Layout,
    scatter: Callable[[Any], Any],
    mark: Mark | None,
) -> Any:
    totals = run_schedule(schedule, stages, ends, layers, pieces, layout, scatter, mark)
    marks = None
    if mark:
        by_leaf = (
            jax.tree.unflatten(jax.tree.structure(tree), marks.T)
            for tree, marks in ((ends, totals.ends_marks), (layers, totals.stack_marks))
        )
        marks = jnp.stack(jax.tree.leaves(join(*by_leaf)), axis=1)
    return (
        join(totals.ends, totals.stack),
        totals.layer_sums | totals.head_sums,
        marks,
    )


def add_up_sums(
    params: Transformer, batch: Batch, stages: Stages, config: Config, layout: Layout
) -> dict[str, jax.Array]:
    """Local: the sums to log of a batch [1, B, S], forward alone: in one piece, or through a
    pipeline in train.microbatches of them, or as many as divide both them and the rows.
    """
    ends, layers = split(params)
    training = config.pipeline()
    if training is None:
        piece = Piece(jax.tree.map(lambda a: a[0], batch))
        return forward_share(stages, ends, layers, piece)[1]
    rows = batch.tokens.shape[1]
    count = math.gcd(rows, config.train.microbatches)
    pieces = jax.tree.map(lambda a: a.reshape(count, rows // count, a.shape[2]), batch)
    schedule = forward_schedule(training.stages, count, training.chunks, training.placement)
    totals = run_schedule(schedule, stages, ends, layers, Piece(pieces), layout)
    return _sums(totals)


def _sums(totals: Totals) -> dict[str, jax.Array]:
    return totals.layer_sums | totals.head_sums
