"""Flip single bits over all files of a run's newest checkpoint, one at a time, and restore it.

    python scripts/flip_bits.py RUN [--flips 120] [--seed 0]

Counts what was refused, what came back right all the same (Orbax keeps files that no restore
needs), and what came back wrong without a word. The last must be 0.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import jax
import numpy as np

from meshwright.sharding.mesh import simulate_devices
from meshwright.trainer.checkpoint.manifest import DamagedError, find_checkpoints
from meshwright.trainer.checkpoint.restore import restore
from meshwright.trainer.config.load import load
from meshwright.trainer.state import lay_out, sharded_shapes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--flips", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    simulate_devices(8)
    config = load(options.run / "config.yaml")
    target = sharded_shapes(config, lay_out(config))
    _, whole = max(find_checkpoints(options.run).items())
    _, expected = restore(whole, target)
    files = [path for path in sorted(whole.rglob("*")) if path.is_file() and path.stat().st_size]
    chosen, counts = random.Random(options.seed), Counter()
    for number in range(options.flips):
        file = files[number % len(files)]  # every file, also the small ones
        with tempfile.TemporaryDirectory() as temporary:
            copy = Path(shutil.copytree(whole, Path(temporary) / whole.name))
            damaged = copy / file.relative_to(whole)
            content, bit = (
                bytearray(damaged.read_bytes()),
                chosen.randrange(8 * file.stat().st_size),
            )
            content[bit // 8] ^= 1 << bit % 8
            damaged.write_bytes(content)
            try:
                _, restored = restore(copy, target)
            except DamagedError:
                counts["refused"] += 1
                continue
            leaves = zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True)
            right = all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in leaves)
            counts["right" if right else "restored wrong silently"] += 1
    wrong = counts["restored wrong silently"]
    print(
        f"{options.flips} flips over {len(files)} files: {counts['refused']} refused, "
        f"{counts['right']} restored right, restored wrong silently: {wrong}"
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
