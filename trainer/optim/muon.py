"""Muon: momentum whose matrices are orthogonalised, one for each layer."""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from ...sharding.collectives import all_to_all_rows
from ...sharding.layout import Layout, map_params, spec_axes
from ...sharding.traffic import ALL_TO_ALL, Traffic, ring
from .matrix_sides import mesh_axes, side_size, sides


def muon(
    momentum: float, others: optax.GradientTransformation, layout: Layout | None
) -> optax.GradientTransformation:
    """Nesterov momentum, orthogonalised by five Newton-Schulz iterations (Muon), for parameters of
    role matrix; `others` for the rest.

    Updates of matrices are scaled to the root mean square 0.2 that AdamW's typically have
    (2502.16982), so that both share one learning rate and one weight decay.
    """

    def name(param: nnx.Param) -> str:
        return "muon" if is_orthogonalised(param) else "others"

    def orthogonal(param: nnx.Param, update: jax.Array) -> jax.Array:
        return orthogonalise(param, update, layout) if is_orthogonalised(param) else update

    momenta = optax.partition(
        {"muon": optax.trace(momentum, nesterov=True), "others": others},
        lambda params: map_params(name, params),
    )
    return optax.chain(
        momenta,
        optax.stateless(lambda updates, params: map_params(orthogonal, params, updates)),
    )


def is_orthogonalised(param: nnx.Param) -> bool:
    return param.role == "matrix" and sides(param) is not None


def orthogonalise(param: nnx.Param, update: jax.Array, layout: Layout | None) -> jax.Array:
    """Local: each layer's matrix of an update of `param`, of which this device holds a part, made
    orthogonal, and scaled to a root mean square of 0.2.

    Newton-Schulz needs whole matrices. The devices that hold parts of the same ones deal them out:
    each receives the parts of every N-th part of the stack, works on those matrices alone, and
    sends their parts back (as in 2502.16982, but by all-to-all). Where the stack does not divide,
    matrices of zeros fill it up.
    """
    pair = sides(param)
    assert pair is not None
    matrices = update.reshape(-1, *(side_size(update, side) for side in pair))
    if layout is None or layout.size(mesh_axes(param, sum(pair, ()), layout)) == 1:
        return _newton_schulz(matrices).reshape(update.shape)
    ins, outs = (mesh_axes(param, side, layout) for side in pair)
    (count, rows, columns), devices = matrices.shape, layout.size((*ins, *outs))
    parts = layout.size(ins), layout.size(outs)
    each = _each(count, devices)

    dealt = jnp.pad(matrices, ((0, each * devices - count), (0, 0), (0, 0)))
    dealt = all_to_all_rows(dealt, (*ins, *outs), layout)
    dealt = dealt.reshape(*parts, each, rows, columns).transpose(2, 0, 3, 1, 4)
    whole = _newton_schulz(dealt.reshape(each, parts[0] * rows, parts[1] * columns))
    back = whole.reshape(each, parts[0], rows, parts[1], columns).transpose(1, 3, 0, 2, 4)
    back = all_to_all_rows(back.reshape(-1, rows, columns), (*ins, *outs), layout)
    return back[:count].reshape(update.shape)


def _newton_schulz(matrices: jax.Array) -> jax.Array:
    """optax's, which is its Muon without momentum, on [n, in, out]."""
    rule = scale_by_muon(
        beta=0.0,
        nesterov=False,
        weight_dimension_numbers=lambda _: MuonDimensionNumbers((1,), (2,)),
    )
    orthogonal, _ = rule.update(matrices, rule.init(matrices))
    return 0.2 * math.sqrt(max(matrices.shape[1:])) * jnp.asarray(orthogonal)


def _each(count: int, devices: int) -> int:
    """Matrices that one of the devices works on."""
    return -(-count // devices)


def muon_sent(param: nnx.Param, layout: Layout) -> Iterator[Traffic]:
    """Twice the device's part of the momentum, but what of it are its own matrices."""
    if not is_orthogonalised(param):
        return
    pair, value = sides(param), param.get_value()
    assert pair is not None
    axes = mesh_axes(param, sum(pair, ()), layout)
    devices, size = layout.size(axes), math.prod(value.shape[dim] for side in pair for dim in side)
    spec = layout.state_spec(param.axes, value.ndim - len(param.axes))
    stacks = layout.size([axis for axis in spec_axes(spec) if axis not in axes])
    each = _each(value.size // size // stacks, devices)
    yield ring("whole matrices", ALL_TO_ALL, axes, 2 * 4 * each * size, layout)
