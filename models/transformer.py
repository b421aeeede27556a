"""A pre-norm decoder (Llama-shaped) as three functions that a schedule drives: embed, blocks,
head_share.

All three are local code inside the step's `shard_map`. x is the residual stream [B_{data,fsdp},
S_{context,tensor}, D] in the compute dtype; parameters are f32 masters, blocks stacked [L, ...] and
scanned.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ..sharding import context
from ..sharding.layout import Layout
from ..sharding.linear import lookup
from . import init
from .attention import Attention, Kernel, attend, causal_mask
from .attention_kernel import Tokens, block_kernel
from .batch import Batch
from .config import ModelConfig, RematConfig
from .dropout import ATTENTION, EMBEDDING, MLP, Dropout, drop
from .mlp import Mlp, swiglu
from .norms import rms_norm
from .remat import scan_layers
from .rope import rotations
from .vocab import Loss, cross_entropy_share


class Block(nnx.Module):
    def __init__(self, config: ModelConfig, key: jax.Array):
        self.norm1 = init.scale(config.d_model, "channel")
        self.attention = Attention(config, key)
        self.norm2 = init.scale(config.d_model, "channel")
        self.mlp = Mlp(config, key)


class Transformer(nnx.Module):
    """Parameters alone; `unembed` is None where the embedding table is tied. numbers: of the layers
    in the order in which `blocks` stacks them, default 0, 1, …; one beyond the model's layers is
    padding, all zeros.
    """

    def __init__(self, config: ModelConfig, key: jax.Array, numbers: Sequence[int] | None = None):
        held = jnp.asarray(range(config.layers) if numbers is None else numbers)
        layers = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(held)
        self.embed = init.embedding(key, config, "embed")
        stack = jax.vmap(lambda key: Block(config, key))(layers)
        self.blocks = jax.tree.map(partial(_real_layers, held < config.layers), stack)
        self.norm = init.scale(config.d_model, "channel")
        self.unembed = None if config.tie_embeddings else init.embedding(key, config, "unembed")


def _real_layers(real: jax.Array, stack: jax.Array) -> jax.Array:
    """stack[L, ...] with padding set to zero."""
    return jnp.where(jnp.expand_dims(real, range(1, stack.ndim)), stack, 0.0)


def split(params: Transformer) -> tuple[Transformer, Block]:
    """(embedding and head, the stack of blocks)"""
    ends = jax.tree.map(lambda leaf: leaf, params)
    ends.blocks = None
    return ends, params.blocks


def join(ends: Transformer, stack: Block) -> Transformer:
    """What `split` took apart."""
    params = jax.tree.map(lambda leaf: leaf, ends)
    params.blocks = stack
    return params


def embed(
    params: Transformer, batch: Batch, layout: Layout, dtype: Any, dropout: Dropout | None = None
) -> jax.Array:
    """Token ids [B, S_context] -> x[B, S_{context,tensor}, D]."""
    with jax.named_scope("embed"):
        x = lookup(batch.tokens, params.embed, layout, dtype)
        return drop(x, dropout, 0, EMBEDDING, layout)


def blocks(
    stack: Block,
    x: jax.Array,
    batch: Batch,
    layout: Layout,
    config: ModelConfig,
    remat: RematConfig,
    dropout: Dropout | None = None,
    numbers: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | float, dict[str, jax.Array]]:
    """The layers of `stack`, scanned: x after them, their own share of the loss and of sums to log.

    numbers [L]: which layers of the model they are, default 0, 1, …; padding (a number beyond the
    model's layers) leaves x as it is.
    """
    rotation = rotations(batch.positions, config)
    at = context.gather_tokens(Tokens(batch.positions, batch.segments), layout)
    consecutive = context.consecutive(batch.tokens.shape[1], layout)
    blockwise = block_kernel(causal_mask(config), consecutive, config.attention_block)

    def kernel(
        q: jax.Array, k: jax.Array, v: jax.Array, sink: jax.Array | None
    ) -> tuple[jax.Array, None]:
        return context.attend(q, k, v, at, blockwise, layout, sink), None

    def layer(x: jax.Array, numbered: tuple[Any, Block]) -> jax.Array:
        number, p = numbered
        x = checkpoint_name(x, "block.input")
        after = block(p, x, kernel, rotation, layout, config, dropout, number)[0]
        return after if numbers is None else jnp.where(number < config.layers, after, x)

    count = len(jax.tree.leaves(stack)[0])
    numbered = jnp.arange(count) if numbers is None else numbers
    x = scan_layers(layer, x, (numbered, stack), remat)
    return x, 0.0, {}


def block(
    p: Block,
    x: jax.Array,
    kernel: Kernel,
    rotation: tuple[jax.Array, jax.Array],
    layout: Layout,
    config: ModelConfig,
    dropout: Dropout | None = None,
    number: jax.Array | int = 0,
) -> tuple[jax.Array, Any]:
    """One layer, training's and decoding's: x after it, and what the attention kernel keeps.
    number: of the layer, to drop by.
    """
    with jax.named_scope("attention"):
        a = rms_norm(x, p.norm1[...], config.norm_eps)
        a, kept = attend(p.attention, a, kernel, rotation, layout, config)
        x = x + drop(a, dropout, number, ATTENTION, layout)
    with jax.named_scope("mlp"):
        h = swiglu(p.mlp, rms_norm(x, p.norm2[...], config.norm_eps), layout)
        x = x + drop(h, dropout, number, MLP, layout)
    return x, kept


def head_share(
    params: Transformer, x: jax.Array, batch: Batch, layout: Layout, config: ModelConfig, loss: Loss
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """This device's share of the loss, and of the sums to log. batch.weights are relative: they add
    up to one over the global batch, so shares add up to means over its valid targets.
    """
    with jax.named_scope("unembed"):
        x, table = head(params, x, config)
        return cross_entropy_share(x, table, batch.targets, batch.weights, layout, loss)


def head(params: Transformer, x: jax.Array, config: ModelConfig) -> tuple[jax.Array, nnx.Param]:
    """x normed, and the table [V_tensor, D_fsdp] it is then multiplied by."""
    table = params.embed if params.unembed is None else params.unembed
    return rms_norm(x, params.norm[...], config.norm_eps), table
