"""What a layer is given beside the residual stream: built once for a micro-batch, passed once.

Shapes: B sequences of this device, S tokens of each, T slots of a cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from ..sharding.layout import Layout
from .config import ModelConfig
from .dropout import Dropout
from .kernels.attention import Tokens
from .pattern import Rope

Rotation = tuple[jax.Array, jax.Array]


class Writing(NamedTuple):
    """Where decoding writes, and what it may read: slot t of a row of the cache holds the token at
    position t.
    """

    rows: jax.Array
    """[B, 1]"""
    slots: jax.Array
    """[B, S]; past the cache's end for padding, which is written nowhere"""
    tokens: Tokens
    """where the tokens stand that are fed, [B, S]"""
    cached: Tokens
    """and those of the cache's slots, [1, T]"""


@dataclass(frozen=True)
class LayerInputs:
    """The last two fields are the layer's own, the others the same for all layers."""

    config: ModelConfig
    layout: Layout
    segments: jax.Array
    """int32 [B, S_context]: which document of its row a token belongs to; below 0: padding"""
    everywhere: Tokens
    """positions and documents of all tokens [B, S], those of context's other devices too"""
    rotations: Mapping[tuple[Rope, int], Rotation]
    """by RoPE and width of what is turned: cosine and sine, [B, S_context, 1, width/2]"""
    dropout: Dropout | None = None
    """None: nothing is left to chance, as outside training"""
    token_share: jax.Array | None = None
    """in training, what one token adds to a mean over the global batch's tokens but padding"""
    writing: Writing | None = None
    """in decoding"""
    number: jax.Array | int = 0
    """of the layer in the model; what is random follows from it"""
    buffers: Mapping[str, Any] | None = None
    """by kind what belongs to the layer and is no parameter; None where nothing does"""
