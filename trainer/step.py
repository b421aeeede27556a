"""One optimizer step, top to bottom, as one shard_map: forward and backward, clip, update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from ..models.batch import Batch
from ..models.dropout import row_keys
from ..models.layers.kinds import adds_loss, is_random, layer_metrics, next_buffers
from ..models.position import advance, position_words
from ..models.transformer import Transformer
from ..sharding.collectives import all_reduce, all_reduce_max, axis_index
from ..sharding.gradients import reduce_gradients, reduced_axes
from ..sharding.layout import Layout, specs
from .assembly import Piece, make_stages, plain_loss, training_loss
from .config import Config
from .data.loader import batch_shapes
from .microbatches import add_up_gradients, add_up_sums
from .optim.learning_rate import learning_rate
from .optim.optimizer import make_optimizer
from .optim.precision import next_scale
from .optim.update import clip, update_params
from .state import State, abstract_state, next_average, sharded_shapes, state_specs


def make_train_step(config: Config, layout: Layout):
    """The jitted step (state, batch) -> (state, metrics): state donated, shardings pinned in and
    out.

    An attempt whose loss or gradient norm is not finite changes nothing but position, the count of
    skipped attempts and the loss scale. metrics are scalars: `step` and `skipped` after the
    attempt, and the two words of `position`; `loss` (mean nll in nats over the batch's valid
    targets), `tokens` (valid targets), `grad_norm` (before clipping), `lr`, of f16 the attempt's
    `loss_scale`, and auxiliary losses under their own names; what kinds of layers measure; and with
    train.halt_on_nan `nonfinite`, bool [microbatch, parameter].
    """
    cuts = state_specs(abstract_state(config), layout)
    step = jax.shard_map(
        partial(train_step, config=config, layout=layout),
        mesh=layout.mesh,
        in_specs=(cuts, layout.batch_spec()),
        out_specs=(cuts, P()),
        check_vma=False,
    )
    shardings = jax.tree.map(layout.sharding, cuts)
    return jax.jit(
        step,
        in_shardings=(shardings, layout.sharding(layout.batch_spec())),
        out_shardings=(shardings, layout.sharding(P())),
        donate_argnums=0,
    )


def train_step(state: State, batch: Batch, *, config: Config, layout: Layout):
    """Local: one attempt on this device's parts of state and batch."""
    scale = None if state.loss_scale is None else state.loss_scale.scale
    metrics, grads = loss_and_grads(
        state.params, batch, state.position, scale, state.buffers, config=config, layout=layout
    )
    with jax.named_scope("optimizer"):
        grads, norm = clip(grads, config.optimizer.clip, layout)
        lr = jnp.asarray(learning_rate(config.optimizer, config.train)(state.step))
        finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
        state = lax.cond(
            finite,
            lambda: updated(state, grads, metrics, lr, config, layout),
            lambda: replace(state, skipped=state.skipped + 1),
        )
        state = replace(
            state,
            position=advance(state.position, config.train.batch_size),
            loss_scale=next_scale(state.loss_scale, finite, config.precision),
        )
    counters = {"step": state.step, "skipped": state.skipped, "position": state.position}
    pieces = config.train.microbatches * layout.size(reduced_axes(layout))
    figures = layer_metrics(metrics, pieces, config.model)
    figures |= {"grad_norm": norm, "lr": lr} | ({} if scale is None else {"loss_scale": scale})
    return state, counters | figures


def updated(
    state: State,
    grads: Transformer,
    metrics: dict[str, jax.Array],
    lr: jax.Array,
    config: Config,
    layout: Layout,
) -> State:
    """Local: the state after an update with clipped gradients."""
    optimizer: Any = make_optimizer(config.optimizer, layout)  # optax's types know no flax module
    params, own, opt = update_params(optimizer, grads, state.opt, state.params, lr, layout)
    step = state.step + 1
    return replace(
        state,
        step=step,
        params=params,
        opt=opt,
        average=next_average(state.average, own, step, config.optimizer),
        buffers=next_buffers(state.buffers, metrics, config.model),
    )


def step_shapes(config: Config, layout: Layout) -> tuple[State, Batch]:
    """Shapes and shardings of the state and the batch that the train step is compiled for."""
    train = config.train
    sharding = layout.sharding(layout.batch_spec())
    batch = batch_shapes(train.batch_size, train.microbatches, train.seq_len, sharding)
    return sharded_shapes(config, layout), batch


def shard_loss_and_grads(config: Config, layout: Layout, params: Transformer):
    """(params, batch, position, loss_scale, buffers) -> (metrics, gradients) as one shard_map over
    the whole mesh; params only for their structure. position: words of the batch's first row, by
    default of 0; what is random follows from it. loss_scale: what the loss is multiplied by for the
    backward pass alone. buffers: State's.
    """
    in_specs = specs(params, layout.param_spec)
    out_specs = specs(params, layout.state_spec)
    mapped = jax.shard_map(
        partial(loss_and_grads, config=config, layout=layout),
        mesh=layout.mesh,
        in_specs=(in_specs, layout.batch_spec(), P(), P(), P()),
        out_specs=(P(), out_specs),
        check_vma=False,
    )

    def loss_and_grads_at(
        params: Transformer,
        batch: Batch,
        position: jax.Array | None = None,
        loss_scale: jax.Array | None = None,
        buffers: Mapping[str, Any] | None = None,
    ):
        if position is None:
            position = jnp.asarray(position_words(0))
        return mapped(params, batch, position, loss_scale, buffers)

    return loss_and_grads_at


def loss_and_grads(
    params: Transformer,
    batch: Batch,
    position: jax.Array,
    loss_scale: jax.Array | None,
    buffers: Mapping[str, Any] | None,
    *,
    config: Config,
    layout: Layout,
):
    """Local: this device's part of the batch [G, B, S], micro-batch after micro-batch, or as the
    pipeline's schedule has them.

    Weights are divided by the number of valid targets of the GLOBAL batch first; after that every
    sum over micro-batches and devices is a mean over targets, whatever their distribution. They
    carry the loss scale too, so that every derivative does. Gradients are f32.
    """
    tokens = all_reduce(jnp.sum(batch.weights), _batch_axes(layout), layout)
    scale = 1.0 if loss_scale is None else loss_scale
    token_share = None
    if adds_loss(config.model):
        real = jnp.sum(batch.segments >= 0, dtype=jnp.float32)
        token_share = scale / jnp.maximum(all_reduce(real, _batch_axes(layout), layout), 1.0)
    batch = replace(batch, weights=batch.weights / (jnp.maximum(tokens, 1.0) / scale))
    keys = None
    if config.train.dropout or is_random(config.model):
        positions = data_positions(position, batch, layout)
        keys = jax.vmap(partial(row_keys, config.run.seed))(positions)

    mark = mark_nonfinite if config.train.halt_on_nan else None
    stages = make_stages(config, layout, training_loss(config), buffers, token_share)
    grads, sums, marks = add_up_gradients(params, Piece(batch, keys), stages, config, layout, mark)
    accumulator_specs = specs(params, layout.accumulator_spec)
    grads = reduce_gradients(grads, accumulator_specs, specs(params, layout.state_spec), layout)
    sums = all_reduce(sums, reduced_axes(layout), layout)
    grads, sums = jax.tree.map(
        lambda a: a / scale if jnp.issubdtype(a.dtype, jnp.floating) else a, (grads, sums)
    )
    metrics = sums | {"tokens": tokens}
    if marks is not None:
        metrics["nonfinite"] = all_reduce_max(marks, reduced_axes(layout), layout) > 0
    return metrics, grads


def mark_nonfinite(tree: Any) -> jax.Array:
    """[leaf] f32: 1 where this device's part of it holds anything that is not finite."""
    marks = [jnp.any(~jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.stack(marks).astype(jnp.float32)


def data_positions(first: jax.Array, batch: Batch, layout: Layout) -> jax.Array:
    """uint32 [G, B, 2]: words of the data positions of this device's rows, as `batch_at` places
    them. first [2]: of the global batch's first row.
    """
    pieces, rows = batch.tokens.shape[:2]
    axes = layout.axes("batch")
    part, parts = axis_index(axes, layout), layout.size(axes)
    row = jnp.arange(pieces)[:, None] * (parts * rows) + jnp.arange(rows)[None, :]
    return advance(first, part * rows + row)


def make_eval_step(config: Config, layout: Layout):
    """The jitted (params, batch, buffers) -> (summed nll in nats, number of targets) over a global
    batch [1, B, S].
    """
    params = abstract_state(config).params

    def sums(params: Transformer, batch: Batch, buffers: Mapping[str, Any] | None):
        stages = make_stages(config, layout, plain_loss(config), buffers)
        sums = add_up_sums(params, batch, stages, config, layout)
        tokens = all_reduce(jnp.sum(batch.weights), _batch_axes(layout), layout)
        return all_reduce(sums["loss"], reduced_axes(layout), layout), tokens

    mapped = jax.shard_map(
        sums,
        mesh=layout.mesh,
        in_specs=(specs(params, layout.param_spec), layout.batch_spec(), P()),
        out_specs=P(),
        check_vma=False,
    )

    def evaluate(params: Transformer, batch: Batch, buffers: Mapping[str, Any] | None = None):
        return mapped(params, batch, buffers)

    return jax.jit(evaluate)


def _batch_axes(layout: Layout) -> tuple[str, ...]:
    """Mesh axes over which devices see different targets."""
    return (*layout.axes("batch"), "context")
