"""Attention over `context` beside `jax.nn.dot_product_attention` with an explicit mask: output and
gradients of q, k and v, over the full grid of modes, devices, masks, kv heads and recomputation.

    .venv/bin/python scripts/context_grid.py

Twenty minutes on two cores. Exit code 1 when one differs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from meshwright import load
from meshwright.models.kernels.attention import Mask, Tokens, block_kernel
from meshwright.sharding import context
from meshwright.trainer.runtime.devices import prepare_devices
from meshwright.trainer.state import lay_out

ROWS, TOKENS, HEADS, SIZE = 2, 256, 8, 8

MODES = ("ring", "zigzag", "ulysses", "all_gather", "usp")
MASKS = {
    "causal": Mask(),
    "window of 100": Mask(window=100),
    "bidirectional": Mask(causal=False),
}
DOCUMENTS = {"one document": [TOKENS], "packed": [70, 26, 3, 1, 60, 96]}
"""Tokens of each document of a row. Of eight devices with 32 tokens each: ends inside a piece and
on an edge (96, 160), documents over three pieces and more.
"""

TOLERANCE = 1e-5
"""Largest difference, over the largest value of that array."""


def tokens_of(lengths: list[int]) -> Tokens:
    segments = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    return Tokens(*(np.tile(a.astype(np.int32), (ROWS, 1)) for a in (positions, segments)))


def plain(mask: Mask, at: Tokens) -> Any:
    """(q, k, v) -> o with all scores at once."""
    ahead = at.positions[:, :, None] - at.positions[:, None, :]
    seen = at.segments[:, :, None] == at.segments[:, None, :]
    if mask.causal:
        seen &= ahead >= 0
    if mask.window is not None:
        seen &= abs(ahead) < mask.window
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, mask=seen[:, None])


def over_context(mode: str, devices: int, mask: Mask, recompute: bool) -> Any:
    """(q, k, v, at) -> o, whole arrays with tokens as the layout deals them out; and that order."""
    overrides = f"mesh.context={devices}", f"layout.context={mode}", f"train.seq_len={TOKENS}"
    alone = "mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1", f"model.heads={HEADS}"
    config = load("tiny", *alone, *overrides, f"device.cpu_devices={devices}")
    layout = lay_out(config, jax.devices()[:devices])

    def local(q: jax.Array, k: jax.Array, v: jax.Array, at: Tokens) -> jax.Array:
        at = context.gather_tokens(at, layout)
        kernel = block_kernel(mask, context.consecutive(q.shape[1], layout), largest=12)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return context.attend(q, k, v, at, kernel, layout)

        return (jax.checkpoint(attend) if recompute else attend)(q, k, v)

    cut = P(None, "context")
    mapped = jax.shard_map(local, mesh=layout.mesh, in_specs=cut, out_specs=cut, check_vma=False)
    return mapped, context.token_at(np.arange(TOKENS), TOKENS, layout)


def deal_out(tree: Any, order: np.ndarray) -> Any:
    return jax.tree.map(lambda a: a[:, order], tree)


def differences() -> Iterator[tuple[str, float]]:
    """Each case's name and its worst relative difference."""
    rng = np.random.default_rng(0)
    for mode, devices, (name, mask), kv_heads, recompute in product(
        MODES, (2, 4, 8), MASKS.items(), (HEADS, 2, 1), (False, True)
    ):
        heads = HEADS, kv_heads, kv_heads, HEADS
        *qkv, do = (jnp.asarray(rng.normal(size=(ROWS, TOKENS, n, SIZE)), "f4") for n in heads)
        mapped, order = over_context(mode, devices, mask, recompute)

        @jax.jit
        def found(qkv: Any, do: jax.Array, at: Tokens, mapped: Any = mapped):
            o, transpose = jax.vjp(lambda *qkv: mapped(*qkv, at), *qkv)
            return o, *transpose(do)

        for packing, lengths in DOCUMENTS.items():
            at = tokens_of(lengths)
            o, transpose = jax.vjp(plain(mask, at), *qkv)
            expected = deal_out((o, *transpose(do)), order)
            pairs = zip(found(*deal_out((qkv, do, at), order)), expected, strict=True)
            worst = max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)
            yield (
                f"{mode} of {devices}, {name}, {packing}, {kv_heads} of {HEADS} heads"
                f"{', recomputed' if recompute else ''}",
                worst,
            )


def main() -> int:
    prepare_devices(load("tiny"))
    cases = dict(differences())
    # a difference that is not a number is none within the tolerance
    wrong = {name: worst for name, worst in cases.items() if not worst <= TOLERANCE}
    for name, worst in wrong.items():
        print(f"DIFFERS  {worst:.1e}  {name}")
    worst = max(cases.values())
    print(f"{len(cases) - len(wrong)} of {len(cases)} equal; the worst differs by {worst:.1e}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
