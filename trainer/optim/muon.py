"""Muon: momentum whose matrices are orthogonalised, one for each layer."""

from __future__ import annotations

import math
from typing import Any

import jax
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers

from ...sharding.layout import map_params
from .matrix_sides import side_size, sides


def muon(momentum: float, others: optax.GradientTransformation) -> optax.GradientTransformation:
    """Nesterov momentum, orthogonalised by five Newton-Schulz iterations (Muon), for parameters of
    role matrix; `others` for the rest.

    Updates of matrices are scaled to the root mean square 0.2 that AdamW's typically have
    (2502.16982), so that both share one learning rate and one weight decay.
    """

    def sides_here(param: nnx.Param) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        return sides(param) if param.role == "matrix" else None

    def name(param: nnx.Param) -> str:
        return "muon" if sides_here(param) else "others"

    def dimension_numbers(param: nnx.Param) -> Any:
        pair = sides_here(param)
        return MuonDimensionNumbers(*pair) if pair else optax.MaskedNode()

    def rescale(param: nnx.Param, update: jax.Array) -> jax.Array:
        pair = sides_here(param)
        longer = max(side_size(update, side) for side in pair) if pair else None
        return update if longer is None else 0.2 * math.sqrt(longer) * update

    orthogonal = optax.contrib.scale_by_muon(
        beta=momentum,
        weight_dimension_numbers=lambda updates: map_params(dimension_numbers, updates),
    )
    return optax.chain(
        optax.partition(
            {"muon": orthogonal, "others": others}, lambda params: map_params(name, params)
        ),
        optax.stateless(lambda updates, params: map_params(rescale, params, updates)),
    )
