"""One device: Meshwright's step over a plain JAX step of the same model (plain.py), remat equal.

Ratios of time, so that below 1 Meshwright is faster.
"""

from __future__ import annotations

import sys

from measure import alternate, compile_cold, parse_rounds, ratios, report, start_jax, temp_ratio
from plain import programs, steppers

from meshwright import load

BOUND = 1.05

SHAPES = {
    "tiny": (),
    "4 layers, d_model 256, vocab 32000": (
        "model.vocab_size=32000",
        "model.layers=4",
        "model.d_model=256",
        "model.kv_heads=4",
        "model.d_ff=1024",
        "train.seq_len=512",
        "train.batch_size=2",
    ),
}
"""Name of a shape -> what it overrides in the preset tiny."""

ONE_DEVICE = ("mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1", "device.cpu_devices=1")


def main() -> int:
    rounds = parse_rounds(__doc__, default=7)
    start_jax(1)
    missed = 0
    for name, shape in SHAPES.items():
        for policy in ("none", "full"):
            config = load("tiny", *ONE_DEVICE, *shape, f"remat.policy={policy}")
            ours, plain = programs(config)
            compiled = compile_cold(ours), compile_cold(plain)
            costs = alternate(*steppers(ours, plain, compiled), rounds)
            figures = [
                *ratios("step", costs, cpu=BOUND, wall=BOUND),
                temp_ratio("step", *compiled, bound=None),
            ]
            missed |= report(f"{name}, remat {policy}: Meshwright / plain", figures)
    return missed


if __name__ == "__main__":
    sys.exit(main())
