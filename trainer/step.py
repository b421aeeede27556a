"""One optimizer step, top to bottom: the shard_map that holds forward and backward, then clip and
update in plain jit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from ..models.batch import Batch
from ..models.dropout import Dropout, row_keys
from ..models.moe import Routing
from ..models.position import advance, position_words
from ..models.transformer import Transformer, blocks, embed, head_share, stacks
from ..models.vocab import Loss
from ..sharding.collectives import all_reduce, all_reduce_max, axis_index
from ..sharding.gradients import UNREDUCED_AXES, reduce_gradients, scatter_gradients
from ..sharding.layout import Layout, specs
from .balancing import expert_metrics, next_bias
from .config import Config
from .data.loader import batch_shapes
from .optimizer import make_optimizer
from .pipeline import Piece, pipeline_gradients, pipeline_sums
from .precision import DTYPES, next_scale
from .schedule import learning_rate
from .state import State, abstract_state, sharded_shapes, state_shardings


def make_train_step(config: Config, layout: Layout):
    """The jitted step (state, batch) -> (state, metrics): state donated, shardings pinned in and
    out.

    An attempt whose loss or gradient norm is not finite changes nothing but position, the count of
    skipped attempts and the loss scale. metrics are scalars: `step` and `skipped` after the
    attempt, and the two words of `position`; `loss` (mean nll in nats over the batch's valid
    targets), `tokens` (valid targets), `grad_norm` (before clipping), `lr`, of f16 the attempt's
    `loss_scale`, and auxiliary losses under their own names; of experts what `expert_metrics` says;
    and with train.halt_on_nan `nonfinite`, bool [microbatch, parameter].
    """
    optimizer: Any = make_optimizer(config.optimizer)  # optax's types know no flax module
    schedule = learning_rate(config.optimizer, config.train)
    state = abstract_state(config)
    gradients = shard_loss_and_grads(config, layout, state.params)

    def train_step(state: State, batch: Batch):
        scaling = {} if state.loss_scale is None else {"loss_scale": state.loss_scale.scale}
        bias = state.router_bias
        metrics, grads = gradients(state.params, batch, state.position, router_bias=bias, **scaling)
        with jax.named_scope("optimizer"):
            grads, norm = clip(grads, config.optimizer.clip)
            lr = schedule(state.step)

            def update(state: State) -> State:
                updates, opt = optimizer.update(grads, state.opt, state.params, lr=lr)
                params = jax.tree.map(jnp.add, state.params, updates)
                bias = next_bias(state.router_bias, metrics, config.model)
                return replace(state, step=state.step + 1, params=params, opt=opt, router_bias=bias)

            def skip(state: State) -> State:
                return replace(state, skipped=state.skipped + 1)

            finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
            loss_scale = next_scale(state.loss_scale, finite, config.precision)
            state = lax.cond(finite, update, skip, state)
            state = replace(
                state,
                position=advance(state.position, config.train.batch_size),
                loss_scale=loss_scale,
            )
        counters = {"step": state.step, "skipped": state.skipped, "position": state.position}
        pieces = config.train.microbatches * layout.size(_all_axes(layout))
        metrics = expert_metrics(metrics, pieces)
        return state, counters | metrics | {"grad_norm": norm, "lr": lr} | scaling

    shardings = state_shardings(state, layout)
    return jax.jit(
        train_step,
        in_shardings=(shardings, layout.sharding(layout.batch_spec())),
        out_shardings=(shardings, layout.sharding(P())),
        donate_argnums=0,
    )


def step_shapes(config: Config, layout: Layout) -> tuple[State, Batch]:
    """Shapes and shardings of the state and the batch that the train step is compiled for."""
    train = config.train
    sharding = layout.sharding(layout.batch_spec())
    batch = batch_shapes(train.batch_size, train.microbatches, train.seq_len, sharding)
    return sharded_shapes(config, layout), batch


def clip(grads: Any, limit: float | None) -> tuple[Any, jax.Array]:
    """Scale all gradients so that their global norm is at most `limit`; returns them and the norm
    before.
    """
    norm = optax.tree.norm(grads)
    if limit is None:
        return grads, norm
    scale = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30))
    return jax.tree.map(lambda grad: grad * scale, grads), norm


def shard_loss_and_grads(config: Config, layout: Layout, params: Transformer):
    """(params, batch, position, loss_scale, router_bias) -> (metrics, gradients) as one shard_map
    over the whole mesh; params only for their structure. position: words of the batch's first row,
    by default of 0; dropout and model.random_second need it. loss_scale: what the loss is
    multiplied by for the backward pass alone. router_bias: State's.
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
        router_bias: jax.Array | None = None,
    ):
        if position is None:
            position = jnp.asarray(position_words(0))
        return mapped(params, batch, position, loss_scale, router_bias)

    return loss_and_grads_at


def loss_and_grads(
    params: Transformer,
    batch: Batch,
    position: jax.Array,
    loss_scale: jax.Array | None,
    router_bias: jax.Array | None,
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
    real = jnp.sum(batch.segments >= 0, dtype=jnp.float32)
    tokens = all_reduce(jnp.sum(batch.weights), _batch_axes(layout), layout)
    scale = 1.0 if loss_scale is None else loss_scale
    token = None
    if config.model.experts is not None:
        token = scale / jnp.maximum(all_reduce(real, _batch_axes(layout), layout), 1.0)
    batch = replace(batch, weights=batch.weights / (jnp.maximum(tokens, 1.0) / scale))
    loss = Loss(
        vocab_size=config.model.vocab_size,
        z_loss=config.train.z_loss,
        label_smoothing=config.train.label_smoothing,
        softcap=config.model.logit_softcap,
    )

    rows = None
    if config.train.dropout or config.model.random_second:
        positions = data_positions(position, batch, layout)
        rows = jax.vmap(partial(row_keys, config.run.seed))(positions)
    dropped = rows if config.train.dropout else None
    pieces = Piece(batch, dropped, rows if config.model.random_second else None)

    by_microbatch = accumulate if config.mesh.pipe == 1 else pipeline_gradients
    mark = mark_nonfinite if config.train.halt_on_nan else None
    routing = Routing(router_bias, token)
    grads, sums, marks = by_microbatch(params, pieces, config, layout, loss, routing, mark)
    accumulator_specs = specs(params, layout.accumulator_spec)
    grads = reduce_gradients(grads, accumulator_specs, specs(params, layout.state_spec), layout)
    sums = all_reduce(sums, _all_axes(layout), layout)
    grads, sums = jax.tree.map(
        lambda a: a / scale if jnp.issubdtype(a.dtype, jnp.floating) else a, (grads, sums)
    )
    metrics = sums | {"tokens": tokens}
    if marks is not None:
        metrics["nonfinite"] = all_reduce_max(marks, _all_axes(layout), layout) > 0
    return metrics, grads


def accumulate(
    params: Transformer,
    pieces: Piece,
    config: Config,
    layout: Layout,
    loss: Loss,
    routing: Routing,
    mark: Callable[[Any], jax.Array] | None,
):
    """Local: gradients and sums to log, added up over micro-batches [G, ...] that follow each
    other; what `mark` [leaf] makes of each one's gradients, [G, leaf].
    """
    in_specs = specs(params, layout.param_spec)
    accumulator_specs = specs(params, layout.accumulator_spec)

    def share(params: Transformer, piece: Piece):
        return forward_share(params, piece, config, layout, loss, routing)

    @jax.jit  # so that its shapes and the scan below trace the model once
    def one_microbatch(params: Transformer, piece: Piece):
        grads, sums = jax.grad(share, has_aux=True)(params, piece)
        marks = mark(grads) if mark else None
        return (scatter_gradients(grads, in_specs, accumulator_specs, layout), sums), marks

    def add(total, piece):
        one, marks = one_microbatch(params, piece)
        return jax.tree.map(jnp.add, total, one), marks

    one, _ = jax.eval_shape(one_microbatch, params, jax.tree.map(lambda a: a[0], pieces))
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), one)
    (grads, sums), marks = lax.scan(add, zeros, pieces)
    return grads, sums, marks


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


def forward_share(
    params: Transformer,
    piece: Piece,
    config: Config,
    layout: Layout,
    loss: Loss,
    routing: Routing,
):
    """Local: one micro-batch [B, S] through the model -> this device's share of the loss and of the
    logged sums.
    """
    dropout = None if piece.dropped is None else Dropout(config.train.dropout, piece.dropped)
    x = embed(params, piece.batch, layout, DTYPES[config.precision.compute], dropout)
    x, within, sums = blocks(
        stacks(params, config.remat),
        x,
        piece.batch,
        layout,
        config.model,
        config.remat,
        dropout,
        routing=routing._replace(rows=piece.seconds),
    )
    share, logged = head_share(params, x, piece.batch, layout, config.model, loss)
    return share + within, logged | sums


def make_eval_step(config: Config, layout: Layout):
    """The jitted (params, batch, router_bias) -> (summed nll in nats, number of targets) over a
    global batch [1, B, S].
    """
    params = abstract_state(config).params
    loss = Loss(config.model.vocab_size, softcap=config.model.logit_softcap)

    def sums(params: Transformer, batch: Batch, router_bias: jax.Array | None):
        routing = Routing(router_bias)
        if config.mesh.pipe == 1:
            piece = Piece(jax.tree.map(lambda a: a[0], batch))
            _, sums = forward_share(params, piece, config, layout, loss, routing)
        else:
            sums = pipeline_sums(params, batch, config, layout, loss, routing)
        tokens = all_reduce(jnp.sum(batch.weights), _batch_axes(layout), layout)
        return all_reduce(sums["loss"], _all_axes(layout), layout), tokens

    mapped = jax.shard_map(
        sums,
        mesh=layout.mesh,
        in_specs=(specs(params, layout.param_spec), layout.batch_spec(), P()),
        out_specs=P(),
        check_vma=False,
    )

    def evaluate(params: Transformer, batch: Batch, router_bias: jax.Array | None = None):
        return mapped(params, batch, router_bias)

    return jax.jit(evaluate)


def _batch_axes(layout: Layout) -> tuple[str, ...]:
    """Mesh axes over which devices see different targets."""
    return (*layout.axes("batch"), "context")


def _all_axes(layout: Layout) -> tuple[str, ...]:
    """Mesh axes over which shares add up: all but those that train apart."""
    return tuple(axis for axis in layout.mesh.axis_names if axis not in UNREDUCED_AXES)
