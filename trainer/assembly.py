"""The model put together: embedding, layers and head as training, evaluation and every stage of a
pipeline run them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from ..models.batch import Batch
from ..models.dropout import Dropout
from ..models.transformer import (
    Layers,
    Transformer,
    blocks,
    chunk_at,
    embed,
    head_share,
    layer_inputs,
)
from ..models.vocab import Loss
from ..sharding.layout import Layout
from ..sharding.pipeline.executor import Stages
from .config import Config
from .optim.precision import DTYPES


class Piece(NamedTuple):
    """One micro-batch, or [G, ...] of several."""

    batch: Batch
    keys: jax.Array | None = None
    """[B, 2], the words of its rows' random keys; None where nothing is left to chance"""


def training_loss(config: Config) -> Loss:
    train = config.train
    return plain_loss(config)._replace(z_loss=train.z_loss, label_smoothing=train.label_smoothing)


def plain_loss(config: Config) -> Loss:
    """What a model is judged by: negative log-likelihood alone."""
    return Loss(config.model.vocab_size, softcap=config.model.logit_softcap)


def make_stages(
    config: Config,
    layout: Layout,
    loss: Loss,
    buffers: Mapping[str, Any] | None = None,
    token_share: jax.Array | None = None,
) -> Stages:
    """The three functions, all local. A chunk's depth counts the chunks of the config's pipeline;
    of one stage there is one, all layers. buffers: State's; token_share: see `LayerInputs`.
    """
    model, depths, first = config.model, len(config.chunk_depths()), config.first_depths()
    dtype = DTYPES[config.precision.compute]

    def dropout(piece: Piece) -> Dropout | None:
        return None if piece.keys is None else Dropout(config.train.dropout, piece.keys)

    def embed_piece(ends: Transformer, piece: Piece) -> jax.Array:
        return embed(ends, piece.batch, layout, dtype, dropout(piece))

    def run_layers(layers: Layers, x: jax.Array, piece: Piece, depth: Any) -> Any:
        given = layer_inputs(piece.batch, layout, model, dropout(piece), token_share, buffers)
        chunk = chunk_at(depth, depths, model, first)
        x, share, sums = blocks(layers, x, chunk, given, config.remat)
        return (x, share), sums

    def head(ends: Transformer, y: jax.Array, piece: Piece) -> Any:
        return head_share(ends, y, piece.batch, layout, model, loss)

    return Stages(embed_piece, run_layers, head)


def forward_share(
    stages: Stages, ends: Transformer, layers: Layers, piece: Piece
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Local: one micro-batch [B, S] through all layers -> this device's share of the loss and of
    the sums to log.
    """
    x = stages.embed(ends, piece)
    (x, within), sums = stages.layers(layers, x, piece, 0)
    share, logged = stages.head(ends, x, piece)
    return share + within, logged | sums
