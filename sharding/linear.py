"""Every multiplication by a weight, and every byte that it moves.

`linear` owns the ZeRO-3 gather of the weight (arXiv 1910.02054), the tensor-parallel entrance and
exit (Megatron: 1909.08053, with sequence parallelism: 2205.05198), the dot and its biases, under
one VJP whose residuals are the local input and the weight SHARD: a gathered weight or sequence is
never saved. That VJP can leave the gradients of the weights for later: see `taps.py`.
`_gather_matmul` and `_matmul_scatter` say whether entrance and exit move the sequence at once or as
collective matmuls. `lookup` is the same weight used as an embedding, `fused_linear` as an output
layer whose full output never exists, `row_products` as one whose output is wanted.

Shapes: B sequences of this device, S tokens, D width of the residual stream, K contracted and N
produced dims, V vocabulary, C chunks of T tokens. A weight is [*K, *N], cut over `fsdp` by ZeRO-3
and over `tensor`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .collective_matmul import gather_matmul, matmul_scatter
from .collectives import all_gather, all_reduce, axis_index, reduce_scatter
from .layout import Layout
from .taps import Tap, Tapped, note_product
from .traffic import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER, LayerRuns, Traffic, ring

SEQUENCE = 1
"""The dim of tokens in every activation [B, S, ...]."""


@dataclass(frozen=True)
class _Plan:
    """What one `linear` moves: the static half of its arguments."""

    layout: Layout
    axes: tuple[tuple[str, ...], ...]
    enter: str | None
    leave: str | None

    @property
    def axis(self) -> str | None:
        return self.enter or self.leave


def linear(
    x: jax.Array,
    weights: nnx.Param | Sequence[nnx.Param],
    layout: Layout,
    *,
    biases: Sequence[nnx.Param | None] = (),
    enter: str | None = None,
    leave: str | None = None,
    input_name: str | None = None,
    name: str | None = None,
) -> Any:
    """x [B, S, *K] times each of `weights` [*K, *N] -> [B, S, *N]: one array, or as many as
    weights.

    enter="tensor", column parallel, one entrance for all weights:
        x[B, S_{context,tensor}, D] ·_D W[D_fsdp, N_tensor] -> y[B, S_context, N_tensor]
    leave="tensor", row parallel:
        x[B, S_context, K_tensor] ·_K W[K_tensor, D_fsdp] -> y[B, S_{context,tensor}, D]
    Over tensor, n the bytes of the whole sequence: the entrance gathers it, (N-1)/N·n, and the exit
    reduce-scatters partial sums, the same; backward each does the other's, and the entrance gathers
    once more for the weight's gradient, and so does an exit's gradient if that is left for later.
    `layout.overlap` moves the same bytes in chunks, each while another is multiplied. With
    `layout.sequence_parallel` off S is not cut over tensor: nothing moves at the entrance, the exit
    all-reduces. Over fsdp each weight is gathered in x's dtype, forward and backward, and its
    gradient reduce-scattered in `layout.reduce`. A bias is added after the exit, hence once.
    `input_name` is what a recomputation policy calls x, the residual of the products, `name` what
    it calls each y.
    """
    assert enter is None or leave is None
    several = not isinstance(weights, nnx.Param)
    x = _named(x, input_name)
    params = tuple(weights) if several else (weights,)
    plan = _Plan(layout, tuple(param.axes for param in params), enter, leave)
    held = [param.get_value() for param in params]
    tap = held[0].tap if isinstance(held[0], Tapped) else None
    shards = tuple(weight[...] for weight in held)
    ys: Any = _linear(x, shards, tap, plan)
    if plan.axis:  # others are small
        note_product(held, x, ys, partial(_gradients, plan=plan))
    if biases:
        ys = tuple(
            y if bias is None else _add_bias(y, bias, layout)
            for y, bias in zip(ys, biases, strict=True)
        )
    ys = tuple(_named(y, name) for y in ys)
    return ys if several else ys[0]


def _named(x: jax.Array, name: str | None) -> jax.Array:
    return x if name is None else checkpoint_name(x, name)


def entrance_sent(width: int, runs: LayerRuns, layout: Layout) -> Iterator[Traffic]:
    """What an entrance of `width` channels sends in a step, n its bytes on a tensor group: it
    gathers n forward and once more for the weights' gradients, and reduce-scatters n backward
    (2205.05198). A recomputation's gather is that of the backward pass, but for branches.
    """
    if layout.config.sequence_parallel:
        gathers = 2 * runs.passes + (runs.again if runs.branch else 0)
        yield from _moved(gathers, runs.passes, width, runs, layout)


def exit_sent(width: int, runs: LayerRuns, layout: Layout, again: float = 0) -> Iterator[Traffic]:
    """What an exit of `width` channels sends in a step: it reduce-scatters n forward, and `again`
    times more where a recomputation reads what it gives, and gathers n backward, once more where a
    schedule has the weights' gradients apart. Without sequence parallelism all of these are
    all-reduces (1909.08053).
    """
    gathers, scatters = runs.passes * (2 if runs.apart else 1), runs.passes + again
    if layout.config.sequence_parallel:
        yield from _moved(gathers, scatters, width, runs, layout)
    else:
        n = width * runs.tokens(layout) * runs.itemsize * (gathers + scatters)
        yield ring("activations", ALL_REDUCE, ["tensor"], n, layout)


def _moved(
    gathers: float, scatters: float, width: int, runs: LayerRuns, layout: Layout
) -> Iterator[Traffic]:
    """Collective matmul (doi 10.1145/3567955.3567959) sends the same in N-1 permutes of n/N."""
    n = width * runs.tokens(layout) * runs.itemsize
    if layout.config.overlap != "none":
        yield ring("collective matmul", PERMUTE, ["tensor"], (gathers + scatters) * n, layout)
    else:
        yield ring("activations", ALL_GATHER, ["tensor"], gathers * n, layout)
        yield ring("activations", REDUCE_SCATTER, ["tensor"], scatters * n, layout)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _linear(
    x: jax.Array, shards: tuple[jax.Array, ...], tap: Tap | None, plan: _Plan
) -> tuple[jax.Array, ...]:
    del tap
    weights = _weights(shards, x.dtype, plan)

    def products(x):
        return tuple(_dot(x, weight) for weight in weights)

    if plan.leave:
        return _matmul_scatter(products, x, plan)
    ys, _ = _gather_matmul(lambda x, _: (products(x), None), x, None, plan)
    return ys


def _linear_forward(x, shards, tap, plan):
    # without the tap: what is computed again would keep its zeros
    return _linear(x, shards, None, plan), (x, shards, None if tap is None else ())


def _linear_backward(plan, residuals, dys):
    x, shards, later = residuals
    weights = _weights(shards, x.dtype, plan)

    def inputs(dys):
        return reduce(jnp.add, map(_dot_input, dys, weights)).astype(x.dtype)

    if later is not None:
        if plan.leave:
            dx, _ = _gather_matmul(lambda dys, _: (inputs(dys), None), dys, None, plan)
        else:
            dx = _matmul_scatter(inputs, dys, plan)
        return dx, None, (x, dys)
    if plan.leave:  # one gather of dys for both
        dx, dweights = _gather_matmul(lambda dys, x: (inputs(dys), _dots(x, dys)), dys, x, plan)
        return dx, _scatter_gradients(dweights, shards, plan), None
    dx = _matmul_scatter(inputs, dys, plan)
    return dx, _gradients(shards, x, dys, plan), None


def _gradients(shards, x, dys, plan) -> tuple[jax.Array, ...]:
    """Of the shards, of which only shapes are read."""
    if plan.leave:
        _, dweights = _gather_matmul(lambda dys, x: (None, _dots(x, dys)), dys, x, plan)
    else:
        _, dweights = _gather_matmul(lambda x, dys: (None, _dots(x, dys)), x, dys, plan)
    return _scatter_gradients(dweights, shards, plan)


def _scatter_gradients(dweights, shards, plan) -> tuple[jax.Array, ...]:
    dshards, layout = [], plan.layout
    for dweight, shard, axes in zip(dweights, shards, plan.axes, strict=True):
        gather = partial(gather_weight, axes=axes, dtype=jnp.float32, layout=layout)
        select = partial(own_heads, axes=axes, layout=layout)
        (dweight,) = jax.linear_transpose(select, jax.eval_shape(gather, shard))(dweight)
        dshards.append(scatter_gradient(dweight, axes, shard.dtype, layout))
    return tuple(dshards)


_linear.defvjp(_linear_forward, _linear_backward)


def _weights(shards: Sequence[jax.Array], dtype: Any, plan: _Plan) -> list[jax.Array]:
    """The weights that this device multiplies by."""
    return [
        own_heads(gather_weight(shard, axes, dtype, plan.layout), axes, plan.layout)
        for shard, axes in zip(shards, plan.axes, strict=True)
    ]


def lookup(ids: jax.Array, table: nnx.Param, layout: Layout, dtype: Any) -> jax.Array:
    """Rows of `table`[V_{pipe,tensor}, D_fsdp] for ids[B, S_context] -> x[B, S_{context,tensor}, D]
    in `dtype`.

    Vocab parallel (1909.08053): a device gives zeros for rows it does not hold; the exit adds up,
    and after it an all-reduce over pipe, whose stages hold rows, too (2411.05288). Moves what the
    exit of a `linear` and the gather of a weight move; the table's gradient is reduce-scattered in
    `layout.reduce`.
    """
    return _lookup(ids, table[...], dtype, _Plan(layout, (table.axes,), None, "tensor"))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(ids: jax.Array, shard: jax.Array, dtype: Any, plan: _Plan) -> jax.Array:
    table = gather_weight(shard, plan.axes[0], dtype, plan.layout)
    row = local_rows(ids, table.shape[0], plan.layout)
    rows = table.at[row].get(mode="fill", fill_value=0)
    return all_reduce(_scatter(rows, plan), _stages(plan.layout), plan.layout)


def _lookup_forward(ids, shard, dtype, plan):
    return _lookup(ids, shard, dtype, plan), (ids, shard)


def _lookup_backward(dtype, plan, residuals, dx):
    ids, shard = residuals
    table = jax.eval_shape(
        lambda shard: gather_weight(shard, plan.axes[0], dtype, plan.layout), shard
    )
    drows = _gather(all_reduce(dx, _stages(plan.layout), plan.layout), plan)
    row = local_rows(ids, table.shape[0], plan.layout)
    dtable = jnp.zeros(table.shape, jnp.float32).at[row].add(drows.astype(jnp.float32), mode="drop")
    return None, scatter_gradient(dtable, plan.axes[0], shard.dtype, plan.layout)


_lookup.defvjp(_lookup_forward, _lookup_backward)

Consume = Callable[..., tuple[jax.Array, jax.Array, Any]]


def fused_linear(
    x: jax.Array, table: nnx.Param, rows: Any, layout: Layout, consume: Consume, chunk: int
) -> tuple[jax.Array, Any]:
    """Multiply x[B, S_{context,tensor}, D] by `table`[V_{pipe,tensor}, D_fsdp], `chunk` tokens at a
    time, and add up what `consume` makes of the products, so that no more than [chunk, V] of the
    device's rows V ever exist.

    `consume(y, rows)` gets y[T, V] in f32 and the T rows of every leaf of `rows` ([B,
    S_context, ...]; zeros pad the last chunk); it returns this device's share of the loss, the
    derivative of the sum of all devices' shares by y, [T, V], and a pytree of scalars to add
    up. The gradients of x and table are formed in the same forward sweep: no product is computed
    twice. Returns the share, differentiable, and the sums, which are not. Moves what the entrance
    of a `linear` moves.
    """
    plan = _Plan(layout, (table.axes,), "tensor", None)
    return _fused(x, table[...], rows, plan, consume, chunk)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _fused(x, shard, rows, plan, consume, chunk):
    share, sums, _ = _sweep(x, shard, rows, plan, consume, chunk, gradients=False)
    return share, sums


def _fused_forward(x, shard, rows, plan, consume, chunk):
    share, sums, gradients = _sweep(x, shard, rows, plan, consume, chunk, gradients=True)
    return (share, sums), gradients


def _fused_backward(plan, consume, chunk, gradients, cotangents):
    dshare, _ = cotangents
    dx, dshard = (gradient * dshare.astype(gradient.dtype) for gradient in gradients)
    return dx, dshard, None


_fused.defvjp(_fused_forward, _fused_backward)


def _sweep(x, shard, rows, plan, consume, chunk, gradients: bool):
    """Share, sums and, where asked for, (dx, dshard) with the layouts of x and shard."""
    layout, axes = plan.layout, plan.axes[0]
    table = gather_weight(shard, axes, x.dtype, layout)
    whole = _gather(x, plan)

    def one_chunk(dtable, piece):
        x, rows = piece
        y = _dot_rows(x, table)
        share, dy, sums = consume(y, rows)
        if not gradients:
            return dtable, (share, sums, None)
        dy = dy.astype(x.dtype)
        dtable += lax.dot_general(
            dy, x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return dtable, (share, sums, dy @ table)

    tokens = whole.shape[0] * whole.shape[1]
    chunk = min(chunk, tokens)
    padding = -tokens % chunk

    def cut(a):  # [B, S, ...] -> [C, T, ...]
        a = a.reshape(tokens, *a.shape[2:])
        a = jnp.pad(a, [(0, padding)] + [(0, 0)] * (a.ndim - 1))
        return a.reshape(-1, chunk, *a.shape[1:])

    dtable = jnp.zeros(table.shape, jnp.float32) if gradients else None
    dtable, (share, sums, dx) = lax.scan(one_chunk, dtable, jax.tree.map(cut, (whole, rows)))
    share, sums = jax.tree.map(lambda a: a.sum(axis=0), (share, sums))
    if dtable is None:
        return share, sums, None
    dx = _scatter(dx.reshape(-1, dx.shape[-1])[:tokens].reshape(whole.shape), plan)
    return share, sums, (dx, scatter_gradient(dtable, axes, shard.dtype, layout))


def row_products(x: jax.Array, table: nnx.Param, layout: Layout) -> jax.Array:
    """x[B, D] times every row of `table`[V_tensor, D_fsdp] -> y[B, V] in f32, the same on all of
    tensor. For generation: not meant to be differentiated.

    Over fsdp the table is gathered in x's dtype; over tensor y is, (N-1)/N of its bytes.
    """
    y = _dot_rows(x, gather_weight(table[...], table.axes, x.dtype, layout))
    return all_gather(y, "tensor", 1, layout)


def by_head(x: jax.Array, weight: nnx.Param, layout: Layout, of_input: bool) -> jax.Array:
    """Each head's x by its own part of `weight`[K_fsdp, H_tensor, N]: x[B, S, H, K] ·_K w[K, H, N]
    -> y[B, S, H, N], or where x is not of its input x[B, S, H, N] ·_N w[K, H, N] -> y[B, S, H, K].
    For decoding: not meant to be differentiated. Over fsdp the weight is gathered in x's dtype.
    """
    whole = gather_weight(weight[...], weight.axes, x.dtype, layout)
    form = "bshk,khn->bshn" if of_input else "bshn,khn->bshk"
    return jnp.einsum(form, x, whole, preferred_element_type=jnp.float32).astype(x.dtype)


def gather_weight(shard: jax.Array, axes: Sequence[str], dtype: Any, layout: Layout) -> jax.Array:
    """W[D_fsdp, N_tensor] -> W[D, N_tensor] in `dtype`, cast before it travels."""
    weight = shard.astype(dtype)
    for dim, name in enumerate(axes):
        weight = all_gather(weight, layout.gathered(name), dim, layout)
    return weight


def scatter_gradient(
    dweight: jax.Array, axes: Sequence[str], dtype: Any, layout: Layout
) -> jax.Array:
    """dW[D, N_tensor]{partial over fsdp} in f32 -> dW[D_fsdp, N_tensor] in the shard's dtype."""
    for dim, name in enumerate(axes):
        dweight = reduce_scatter(dweight, layout.gathered(name), dim, layout, layout.reduce)
    return dweight.astype(dtype)


def own_heads(weight: jax.Array, axes: Sequence[str], layout: Layout) -> jax.Array:
    """The kv heads this tensor rank works with, of a weight or bias that holds all of them.

    With fewer kv heads than tensor shards (or an indivisible number) the parameter is replicated
    over tensor; each rank takes the heads that its query heads share, and its gradient for the
    others is zero.
    """
    if "kv_heads" not in axes or layout.axes("kv_heads"):
        return weight
    dim, copies = list(axes).index("kv_heads"), layout.resolved.kv_copies
    mine = copies // layout.size("tensor")
    head = (axis_index("tensor", layout) * mine + jnp.arange(mine)) * weight.shape[dim] // copies
    return jnp.take(weight, head, axis=dim, mode="clip")


def _add_bias(y: jax.Array, bias: nnx.Param, layout: Layout) -> jax.Array:
    """y[B, S, *N] + bias[*N], added, and its gradient summed, in f32."""
    own = own_heads(bias[...], bias.axes, layout)
    return (y.astype(jnp.float32) + own.reshape(1, 1, *own.shape)).astype(y.dtype)


def _stages(layout: Layout) -> tuple[str, ...]:
    """Mesh axes beside tensor that cut a vocabulary table."""
    return tuple(axis for axis in layout.axes("vocab") if axis != "tensor")


def local_rows(ids: jax.Array, rows: int, layout: Layout) -> jax.Array:
    """Token ids as row numbers of this device's part of a vocabulary table; `rows`, one past it, if
    not there.
    """
    row = ids - axis_index(layout.axes("vocab"), layout) * rows
    return jnp.where((row >= 0) & (row < rows), row, rows)


def _gather_matmul(
    function: Callable[[Any, Any], tuple[Any, Any]], cut: Any, whole: Any, plan: _Plan
) -> tuple[Any, Any]:
    """`function(cut, whole)` -> (ys, sums) once cut[B, S_{context,tensor}, ...] is gathered like
    whole[B, S_context, ...]: ys have a row for each token, sums add their products up.
    """
    if plan.axis and plan.layout.config.overlap != "none":
        return gather_matmul(function, cut, whole, plan.axis, SEQUENCE, plan.layout)
    return function(_gather(cut, plan), whole)


def _matmul_scatter(function: Callable[[Any], Any], whole: Any, plan: _Plan) -> Any:
    """`function(whole[B, S_context, ...])`{partial over tensor} -> [B, S_{context,tensor}, ...]."""
    if plan.axis and plan.layout.config.overlap != "none":
        return matmul_scatter(function, whole, plan.axis, SEQUENCE, plan.layout)
    return _scatter(function(whole), plan)


def _gather(tree: Any, plan: _Plan) -> Any:
    """A[B, S_{context,tensor}, ...] -> A[B, S_context, ...]: an entrance or an exit's transpose."""
    return _move(all_gather, tree, plan)


def _scatter(tree: Any, plan: _Plan) -> Any:
    """A[B, S_context, ...]{partial over tensor} -> A[B, S_{context,tensor}, ...]: an exit, or an
    entrance's transpose.
    """
    return _move(reduce_scatter, tree, plan)


def _move(collective: Callable[..., jax.Array], tree: Any, plan: _Plan) -> Any:
    """Without sequence parallelism S is whole on all of tensor: an entrance moves nothing, an exit
    and its transpose all-reduce.
    """
    if plan.layout.config.sequence_parallel:
        axes = plan.axis or ()
        return jax.tree.map(lambda a: collective(a, axes, SEQUENCE, plan.layout), tree)
    return all_reduce(tree, plan.leave or (), plan.layout)


def _dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x[B, S, *K] ·_K w[*K, *N] -> y[B, S, *N]. Flat operands: CPU and TPU alike multiply matrices
    best.
    """
    k = math.prod(x.shape[2:])
    y = x.reshape(-1, k) @ weight.reshape(k, -1)
    return y.reshape(*x.shape[:2], *weight.shape[x.ndim - 2 :])


def _dot_rows(x: jax.Array, table: jax.Array) -> jax.Array:
    """x[T, D] ·_D table[V, D] -> y[T, V] in f32."""
    return lax.dot_general(x, table, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _dot_input(dy: jax.Array, weight: jax.Array) -> jax.Array:
    """dy[B, S, *N] ·_N w[*K, *N] -> dx[B, S, *K] in f32."""
    n = math.prod(dy.shape[2:])
    dims = (((1,), (1,)), ((), ()))
    dx = lax.dot_general(
        dy.reshape(-1, n), weight.reshape(-1, n), dims, preferred_element_type=jnp.float32
    )
    return dx.reshape(*dy.shape[:2], *weight.shape[: weight.ndim - dy.ndim + 2])


def _dot_weight(x: jax.Array, dy: jax.Array) -> jax.Array:
    """x[B, S, *K] ·_{B,S} dy[B, S, *N] -> dw[*K, *N] in f32."""
    tokens = x.shape[0] * x.shape[1]
    dims = (((0,), (0,)), ((), ()))
    dw = lax.dot_general(
        x.reshape(tokens, -1), dy.reshape(tokens, -1), dims, preferred_element_type=jnp.float32
    )
    return dw.reshape(*x.shape[2:], *dy.shape[2:])


def _dots(x: jax.Array, dys: Sequence[jax.Array]) -> list[jax.Array]:
    return [_dot_weight(x, dy) for dy in dys]
