"""Draw which device computes which (query, key) pairs of a causal row: the pictures of
docs/context.md.

    .venv/bin/python scripts/draw_placement.py docs/context
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from meshwright import load, simulate_devices
from meshwright.sharding.context import causal_pairs, token_at
from meshwright.trainer.log.pictures import empty_figure
from meshwright.trainer.state import lay_out

DEVICES, TOKENS = 4, 64


def draw(mode: str, path: Path) -> None:
    """Queries downwards, keys to the right; hidden pairs are white."""
    alone = "mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1", f"device.cpu_devices={DEVICES}"
    cut = f"mesh.context={DEVICES}", f"layout.context={mode}", f"train.seq_len={TOKENS}"
    layout = lay_out(load("tiny", *alone, *cut))
    token = token_at(np.arange(TOKENS), TOKENS, layout)
    device = np.empty(TOKENS, int)
    device[token] = np.arange(TOKENS) * DEVICES // TOKENS
    hidden = np.arange(TOKENS)[:, None] < np.arange(TOKENS)[None, :]
    owner = np.ma.array(np.repeat(device[:, None], TOKENS, axis=1), mask=hidden)

    figure = empty_figure(figsize=(4.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(owner, cmap="tab10", vmin=0, vmax=9, interpolation="nearest")
    work = causal_pairs(TOKENS, layout)
    shares = " · ".join(f"{share:.0%}" for share in work / work.sum())
    axes.set(title=f"{mode}: {shares}", xlabel="key", ylabel="query")
    figure.savefig(path / f"{mode}.png", dpi=90)


def main() -> int:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    simulate_devices(DEVICES)
    for mode in ("ring", "zigzag"):
        draw(mode, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
