"""The model's three functions as what a pipeline's schedule drives: over `pipe` a device holds some
of the layers, and rows of the vocabulary. Shapes: G micro-batches, B sequences, S tokens, L layers
of the model, n of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..models.batch import Batch
from ..models.dropout import Dropout
from ..models.moe import Routing
from ..models.remat import group_layers, ungroup_layers
from ..models.transformer import Block, Transformer, blocks, embed, head_share, join, split
from ..models.vocab import Loss
from ..sharding.gradients import scatter_gradients
from ..sharding.layout import Layout, specs
from ..sharding.pipeline.executor import Stages, run_schedule
from ..sharding.pipeline.schedules import Schedule, forward_schedule
from .config import Config
from .precision import DTYPES


class Piece(NamedTuple):
    """One micro-batch, or [G, ...] of several. dropped, seconds: the words of its rows' keys, [B,
    2], where channels are dropped and where second experts are left out by chance.
    """

    batch: Batch
    dropped: jax.Array | None = None
    seconds: jax.Array | None = None


def pipeline_gradients(
    params: Transformer,
    pieces: Piece,
    config: Config,
    layout: Layout,
    loss: Loss,
    routing: Routing,
    mark: Callable[[Any], jax.Array] | None,
):
    """Local: gradients and sums to log, added up over micro-batches [G, ...] that pass the stages
    by the config's schedule; what `mark` [leaf] makes of each one's gradients, [G, leaf].
    """
    schedule = config.pipeline()
    assert schedule is not None

    def scatter(grads: Any) -> Any:
        before, after = layout.param_spec, layout.accumulator_spec
        return scatter_gradients(grads, specs(grads, before), specs(grads, after), layout)

    ends, stack = split(params)
    stack = group_layers(stack, config.remat)
    stages = _stages(schedule, config, layout, loss, routing)
    totals = run_schedule(schedule, stages, ends, stack, pieces, layout, scatter, mark)
    marks = None
    if mark:
        by_leaf = (
            jax.tree.unflatten(jax.tree.structure(tree), marks.T)
            for tree, marks in zip((ends, stack), totals.marks, strict=True)
        )
        marks = jnp.stack(jax.tree.leaves(join(*by_leaf)), axis=1)
    stack = ungroup_layers(totals.stack, config.remat)
    return join(totals.ends, stack), _sums(totals), marks


def pipeline_sums(
    params: Transformer, batch: Batch, config: Config, layout: Layout, loss: Loss, routing: Routing
) -> dict[str, jax.Array]:
    """Local: the sums to log of a batch [1, B, S], forward alone, in train.microbatches pieces or
    as many as divide both them and the rows.
    """
    training = config.pipeline()
    assert training is not None
    rows = batch.tokens.shape[1]
    count = math.gcd(rows, config.train.microbatches)
    pieces = jax.tree.map(lambda a: a.reshape(count, rows // count, a.shape[2]), batch)
    schedule = forward_schedule(training.stages, count, training.chunks, training.placement)
    stages = _stages(schedule, config, layout, loss, routing)
    ends, stack = split(params)
    stack = group_layers(stack, config.remat)
    return _sums(run_schedule(schedule, stages, ends, stack, Piece(pieces), layout))


def _stages(
    schedule: Schedule, config: Config, layout: Layout, loss: Loss, routing: Routing
) -> Stages:
    depths = schedule.stages * schedule.chunks
    layers, model = config.model.layers, config.model

    def dropout(piece: Piece) -> Dropout | None:
        return None if piece.dropped is None else Dropout(config.train.dropout, piece.dropped)

    def embed_piece(ends: Transformer, piece: Piece) -> jax.Array:
        return embed(ends, piece.batch, layout, DTYPES[config.precision.compute], dropout(piece))

    def run_layers(chunk: Block, x: jax.Array, piece: Piece, depth: Any) -> Any:
        first, end = layers * depth // depths, layers * (depth + 1) // depths
        number = first + jnp.arange(-(-layers // depths))
        numbers = jnp.where(number < end, number, layers)  # as in `stacked_layers`
        x, share, sums = blocks(
            [chunk],
            x,
            piece.batch,
            layout,
            model,
            config.remat,
            dropout(piece),
            numbers,
            routing._replace(rows=piece.seconds),
        )
        return (x, share), sums

    def head(ends: Transformer, y: jax.Array, piece: Piece) -> Any:
        return head_share(ends, y, piece.batch, layout, model, loss)

    return Stages(embed_piece, run_layers, head)


def _sums(totals: Any) -> dict[str, jax.Array]:
    of_layers, of_head = totals.sums
    return of_layers | of_head
