"""What every kind of layer is: a room with the same doors, so that nothing outside this folder asks
which kind a layer is.

A new kind is one file here with its `Kind`, a row in `kinds.py`, its keys in `models/config/`, and
its tests. Shapes: B sequences of this device, S tokens, D width of the residual stream, R rows of a
cache, T its slots, n layers of a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from flax import nnx

from ...sharding.layout import Layout
from ...sharding.traffic import LayerRuns, Traffic
from .. import init
from ..config import ModelConfig
from ..pattern import Layer


class Sublayer(nnx.Module):
    """Parameters of one half of a layer, the mixer or what follows it: here its norms, in the kinds
    that inherit this the rest. norm scales what the half is given, out_norm what it adds to the
    residual stream; model.norm says which there are.
    """

    def __init__(self, config: ModelConfig):
        shape, where = (config.d_model,), config.norm
        self.norm = None if where == "post" else init.scale(("channel",), shape)
        self.out_norm = None if where == "pre" else init.scale(("channel",), shape)


class Tally(NamedTuple):
    """What one layer measures in a step: this device's shares."""

    loss: jax.Array
    """what it adds to the loss that is differentiated, weighted"""
    totals: dict[str, jax.Array]
    """sums to log, added up over layers"""
    by_layer: dict[str, jax.Array]
    """and those that are logged for each layer: [n, ...] of n layers"""


def _nothing(*_: Any) -> Any:
    return None


def _no_numbers(_: ModelConfig) -> tuple[int, int]:
    return 0, 0


def _never(_: ModelConfig) -> bool:
    return False


def _no_sent(*_: Any) -> Iterable[Traffic]:
    return ()


def _same_metrics(metrics: dict[str, jax.Array], *_: Any) -> dict[str, jax.Array]:
    return metrics


@dataclass(frozen=True)
class Kind:
    """The doors of a kind of layer. x is [B, S_{context,tensor}, D] in the compute dtype."""

    scope: str
    """its `jax.named_scope`"""
    params: Callable[[ModelConfig, jax.Array], Sublayer]
    """(config, key) -> the parameters of one layer"""
    apply: Callable[..., tuple[jax.Array, Tally | None]]
    """(p, x, layer, inputs) -> what joins the residual stream, like x, and what was measured:
    training, evaluation
    """
    flops: Callable[[ModelConfig, Layer, int], float]
    """(config, layer, tokens of a row) -> FLOPs of the row, forward"""
    sent: Callable[[ModelConfig, Layer, LayerRuns, Layout], Iterable[Traffic]] = _no_sent
    """(config, layer, runs, layout) -> bytes that one device sends for one layer in a step"""
    rotary_width: Callable[[ModelConfig], int | None] = _nothing
    """channels of a head that RoPE turns; None: it uses none"""
    cache: Callable[[ModelConfig, int, int, int, Layout, Any], Any] = _nothing
    """(config, n, R, T, layout, dtype) -> the empty cache of n layers, a tree of [n, R, ...]; None
    where decoding caches nothing
    """
    extend: Callable[..., tuple[jax.Array, Any]] | None = None
    """(p, x, layer, inputs, cache, place) -> what joins the residual stream, and the cache with the
    tokens of x written to that of layer `place` of n. None: decoding is `apply`
    """
    adds_loss: bool = False
    """whether training adds to the loss what a layer's `Tally` says"""
    random: Callable[[ModelConfig], bool] = _never
    """whether training leaves anything but dropout to chance"""
    buffers: Callable[[ModelConfig], Any] = _nothing
    """the first values of what belongs to one layer and is no parameter; None where nothing does"""
    next_buffers: Callable[[Any, dict[str, jax.Array], ModelConfig], Any] = _nothing
    """(buffers [n, ...], sums of a step over the whole mesh, config) -> those after an update"""
    measured: Callable[[ModelConfig], tuple[int, int]] = _no_numbers
    """how many numbers a `Tally` has: those of each layer, and totals"""
    metrics: Callable[[dict[str, jax.Array], int], dict[str, jax.Array]] = _same_metrics
    """(sums of a step over the whole mesh, devices times micro-batches) -> figures to log"""
