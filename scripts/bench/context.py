"""Attention over `context`: temporary bytes beside one device with an eighth of the row, the time
that skipping hidden blocks saves, and one device's blockwise attention beside JAX's own.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from measure import (
    Figure,
    Program,
    alternate,
    compile_cold,
    parse_rounds,
    random_batch,
    ratios,
    report,
    start_jax,
    temp_ratio,
)

from meshwright import load
from meshwright.models.kernels.attention import Mask, Tokens, block_kernel
from meshwright.sharding import context
from meshwright.sharding.layout import Layout
from meshwright.trainer.state import abstract_state, lay_out
from meshwright.trainer.step import make_train_step

MODES = ("ring", "zigzag", "ulysses", "all_gather", "usp")
ALONE = "mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1", "train.batch_size=1", "model.heads=8"
HEADS, SIZE = 4, 64


def step(devices: int, tokens: int, mode: str = "ring") -> Program:
    """A step that is only compiled: its state is shapes."""
    cut = f"mesh.context={devices}", f"layout.context={mode}", f"train.seq_len={tokens}"
    config = load("tiny", *ALONE, *cut, f"device.cpu_devices={devices}", "remat.policy=full")
    layout = lay_out(config, jax.devices()[:devices])
    return Program(
        lambda: make_train_step(config, layout), abstract_state(config), random_batch(config)
    )


def temporary(tokens: int) -> list[Figure]:
    alone = compile_cold(step(1, tokens // 8))
    return [
        temp_ratio(
            f"{mode}, {tokens:,} / {tokens // 8:,}", compile_cold(step(8, tokens, mode)), alone, 1.3
        )
        for mode in MODES
    ]


def layout_of(devices: int, tokens: int, mode: str = "ring") -> Layout:
    cut = f"mesh.context={devices}", f"layout.context={mode}", f"train.seq_len={tokens}"
    config = load("tiny", *ALONE, *cut, f"device.cpu_devices={devices}")
    return lay_out(config, jax.devices()[:devices])


def attention(layout: Layout, tokens: int, mask: Mask) -> Any:
    """Compiled (q, k, v) -> gradients of blockwise attention of one row over `context`."""

    def local(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array):
        places = context.gather_tokens(Tokens(positions, 0 * positions), layout)
        kernel = block_kernel(mask, context.consecutive(q.shape[1], layout))
        return context.attend(q, k, v, places, kernel, layout)

    cut = P(None, "context")
    whole = jax.shard_map(local, mesh=layout.mesh, in_specs=cut, out_specs=cut, check_vma=False)
    return gradients(lambda *qkv: whole(*qkv, jnp.arange(tokens)[None]), tokens)


def gradients(function: Any, tokens: int) -> Any:
    shape = jax.ShapeDtypeStruct((1, tokens, HEADS, SIZE), jnp.float32)
    squared = jax.grad(lambda *qkv: jnp.sum(function(*qkv) ** 2), argnums=(0, 1, 2))
    return jax.jit(squared).lower(shape, shape, shape).compile()


def compare(name: str, first: Any, second: Any, tokens: int, bound: float, rounds: int):
    rows = jax.random.normal(jax.random.key(0), (3, 1, tokens, HEADS, SIZE))
    costs = alternate(lambda: first(*rows), lambda: second(*rows), rounds)
    return ratios(name, costs, cpu=bound, wall=bound)


def main() -> int:
    rounds = parse_rounds(__doc__, default=5)
    start_jax(8)
    missed = 0
    for tokens in (4096, 16384, 65536):
        missed |= report("context=8 / one device", temporary(tokens))

    tokens, ring = 8192, layout_of(8, 8192)
    causal, all_pairs = (attention(ring, tokens, Mask(causal=flag)) for flag in (True, False))
    figures = compare("ring of 8, causal / all pairs", causal, all_pairs, tokens, 0.65, rounds)
    work = context.causal_pairs(tokens, layout_of(8, tokens, "zigzag"))
    figures.append(Figure("zigzag, causal pairs, max / mean", work.max() / work.mean(), 1.0))
    missed |= report("hidden blocks", figures)

    tokens = 4096
    ours = attention(layout_of(1, tokens), tokens, Mask(causal=True))
    theirs = gradients(lambda *qkv: jax.nn.dot_product_attention(*qkv, is_causal=True), tokens)
    figures = compare("blockwise / jax.nn.dot_product_attention", ours, theirs, tokens, 1.0, rounds)
    figures.append(temp_ratio("the same", ours, theirs, 1.0))
    longer = attention(layout_of(1, 2 * tokens), 2 * tokens, Mask(causal=True))
    figures.append(temp_ratio("8,192 / 4,096 tokens", longer, ours, 2.1))
    return missed | report("one device, 4,096 tokens", figures)


if __name__ == "__main__":
    sys.exit(main())
