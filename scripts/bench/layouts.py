"""What a layout costs beside another, on eight simulated devices: ZeRO's stages beside stage 0,
collective matmul beside gather and multiply, and gradient bytes under accumulation.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
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
    stepper,
    temp_ratio,
)

from meshwright import load
from meshwright.trainer.config import Config
from meshwright.trainer.inspect.plan import make_plan
from meshwright.trainer.state import init_state, lay_out
from meshwright.trainer.step import make_train_step

SHAPE = (
    *("model.layers=4", "model.d_model=256", "model.kv_heads=4", "model.d_ff=1024"),
    *("train.seq_len=256", "train.batch_size=8", "mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1"),
)

COMPARED = (
    # name, first, second, bound on CPU-seconds and wall seconds
    ("fsdp=8: zero 1 / zero 0", "mesh.fsdp=8 layout.zero=1", "mesh.fsdp=8 layout.zero=0", 1.05),
    ("fsdp=8: zero 2 / zero 0", "mesh.fsdp=8 layout.zero=2", "mesh.fsdp=8 layout.zero=0", None),
    ("fsdp=8: zero 3 / zero 0", "mesh.fsdp=8 layout.zero=3", "mesh.fsdp=8 layout.zero=0", 1.25),
    (
        "fsdp=2 tensor=4: overlap / none",
        "mesh.fsdp=2 mesh.tensor=4 layout.overlap=ring",
        "mesh.fsdp=2 mesh.tensor=4",
        None,
    ),
)


def program(config: Config) -> Program:
    layout = lay_out(config)
    batch = jax.device_put(random_batch(config), layout.sharding(layout.batch_spec()))
    return Program(lambda: make_train_step(config, layout), init_state(config, layout), batch)


def compare(name: str, first: str, second: str, bound: float | None, rounds: int) -> list[Figure]:
    programs = [program(load("tiny", *SHAPE, *layout.split())) for layout in (first, second)]
    compiled: list[Any] = [compile_cold(each) for each in programs]
    costs = alternate(*map(stepper, compiled, programs), rounds)
    return [
        *ratios(name, costs, cpu=bound, wall=bound),
        temp_ratio(name, *compiled, bound=None),
    ]


def gradient_bytes(zero: int, pieces: int) -> int:
    """Bytes that a device sends of gradients that ZeRO cuts, in one update."""
    layout = "mesh.fsdp=8", f"layout.zero={zero}", f"train.microbatches={pieces}"
    config = load("tiny", *SHAPE, "train.batch_size=64", *layout)
    plan = make_plan(config, jax.devices())
    return sum(row.sent for row in plan.moved if row.kind == "reduce-scatter")


def main() -> int:
    rounds = parse_rounds(__doc__, default=7)
    start_jax(8)
    missed = 0
    for each in COMPARED:
        missed |= report(each[0], compare(*each, rounds))
    ratio = gradient_bytes(1, 8) / gradient_bytes(2, 8)
    name = "zero 1 / zero 2, 8 micro-batches, gradient bytes"
    return missed | report("bytes", [Figure(name, ratio, 1 / 8)])


if __name__ == "__main__":
    sys.exit(main())
