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
from .moe import Moe, Routing, Tally, add_layer, empty_tally, log_tally, moe
from .norms import rms_norm
from .remat import group_layers, scan_layers
from .rope import rotations
from .vocab import Loss, cross_entropy_share


class Block(nnx.Module):
    def __init__(self, config: ModelConfig, key: jax.Array, dense: bool):
        self.norm1 = init.scale(config.d_model, "channel")
        self.attention = Attention(config, key)
        self.norm2 = init.scale(config.d_model, "channel")
        self.mlp = Mlp(config, key, config.d_ff) if dense else Moe(config, key)


class Transformer(nnx.Module):
    """Parameters alone; `unembed` is None where the embedding table is tied, `dense_blocks`, before
    the others, where all are alike. numbers: of the layers in the order in which `blocks` stacks
    them, default the model's; one beyond them is padding, all zeros.
    """

    def __init__(self, config: ModelConfig, key: jax.Array, numbers: Sequence[int] | None = None):
        held = jnp.asarray(config.stacked if numbers is None else numbers)
        first, dense = jnp.arange(config.dense_layers), config.experts is None

        def stack(numbers: jax.Array, dense: bool) -> Block:
            keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(numbers)
            return jax.vmap(lambda key: Block(config, key, dense))(keys)

        self.embed = init.embedding(key, config, "embed")
        self.dense_blocks = stack(first, dense=True) if len(first) else None
        real = partial(_real_layers, held < config.layers)
        self.blocks = jax.tree.map(real, stack(held, dense))
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


def stacks(params: Transformer, remat: RematConfig) -> list[Block]:
    """All blocks, in the order of the model, as `blocks` takes them: those that are alike are
    stacked.
    """
    alike = [stack for stack in (params.dense_blocks, params.blocks) if stack is not None]
    return [group_layers(stack, remat) for stack in alike]


def blocks(
    stacks: Sequence[Block],
    x: jax.Array,
    batch: Batch,
    layout: Layout,
    config: ModelConfig,
    remat: RematConfig,
    dropout: Dropout | None = None,
    numbers: jax.Array | None = None,
    routing: Routing | None = None,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """The layers of each of `stacks`, scanned: x after them, this device's further share of the
    loss, and of the sums to log; a dense model has no such share.

    numbers [L]: which layers of the model they are, default 0, 1, …; padding (a number beyond the
    model's layers) leaves x as it is. routing: of the layers with experts.
    """
    rotation = rotations(batch.positions, config)
    at = context.gather_tokens(Tokens(batch.positions, batch.segments), layout)
    consecutive = context.consecutive(batch.tokens.shape[1], layout)
    blockwise = block_kernel(causal_mask(config), consecutive, config.attention_block)

    def kernel(
        q: jax.Array, k: jax.Array, v: jax.Array, sink: jax.Array | None
    ) -> tuple[jax.Array, None]:
        return context.attend(q, k, v, at, blockwise, layout, sink), None

    def layer(
        state: tuple[jax.Array, Tally | None], numbered: tuple[jax.Array, Block]
    ) -> tuple[jax.Array, Tally | None]:
        (x, tally), (number, p) = state, numbered
        x = checkpoint_name(x, "block.input")
        place = number - config.dense_layers
        own = None if routing is None else routing.of_layer(place)
        after, one, _ = block(
            p, x, batch.segments, kernel, rotation, layout, config, dropout, number, own
        )
        if numbers is not None:
            real = number < config.layers
            after = jnp.where(real, after, x)
            one = jax.tree.map(lambda a: jnp.where(real, a, jnp.zeros_like(a)), one)
        return after, tally if tally is None or one is None else add_layer(tally, one, place)

    tally = None if config.experts is None else empty_tally(len(config.stacked), config)
    lengths = [len(jax.tree.leaves(stack)[0]) * remat.every for stack in stacks]
    held = jnp.arange(sum(lengths)) if numbers is None else numbers
    for stack, length in zip(stacks, lengths, strict=True):
        own, held = group_layers(held[:length], remat), held[length:]
        x, tally = scan_layers(layer, (x, tally), (own, stack), remat)
    if tally is None:
        return x, jnp.zeros(()), {}
    return x, tally.balance + tally.partition, log_tally(tally, config)


def block(
    p: Block,
    x: jax.Array,
    segments: jax.Array,
    kernel: Kernel,
    rotation: tuple[jax.Array, jax.Array],
    layout: Layout,
    config: ModelConfig,
    dropout: Dropout | None = None,
    number: jax.Array | int = 0,
    routing: Routing | None = None,
) -> tuple[jax.Array, Tally | None, Any]:
    """One layer, training's and decoding's: x after it, the tally of its experts, None of a dense
    one, and what the attention kernel keeps. segments [B, S_context]: below 0 for padding. number:
    of the layer, to drop by. routing: this layer's.
    """
    with jax.named_scope("attention"):
        a = rms_norm(x, p.norm1[...], config.norm_eps)
        a, kept = attend(p.attention, a, kernel, rotation, layout, config)
        x = x + drop(a, dropout, number, ATTENTION, layout)
    if isinstance(p.mlp, Moe):
        with jax.named_scope("moe"):
            h = rms_norm(x, p.norm2[...], config.norm_eps)
            h, tally = moe(p.mlp, h, segments, routing or Routing(), number, layout, config)
            x = x + drop(h, dropout, number, MLP, layout)
        return x, tally, kept
    with jax.named_scope("mlp"):
        h = swiglu(p.mlp, rms_norm(x, p.norm2[...], config.norm_eps), layout)
        x = x + drop(h, dropout, number, MLP, layout)
    return x, None, kept


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
