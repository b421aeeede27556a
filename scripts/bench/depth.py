"""Depth costs no compile time: layers are scanned. And full remat pays in temp bytes.

Tiny widths, on one device and on fsdp=4 · tensor=2.
"""

from __future__ import annotations

import sys
from functools import partial

import jax
from measure import (
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
from meshwright.trainer.state import abstract_state, lay_out
from meshwright.trainer.step import make_train_step

SHALLOW, DEEP = 4, 64
COMPILE_CPU, TEMP_BYTES = 1.5, 1.0
MESHES = {"one device": (1, 1), "fsdp=4 · tensor=2": (4, 2)}


def program(layers: int, fsdp: int, tensor: int, remat: str) -> Program:
    """A step that is only compiled: its state is shapes."""
    mesh = ("mesh.data=1", f"mesh.fsdp={fsdp}", f"mesh.tensor={tensor}")
    config = load(
        "tiny",
        *mesh,
        f"device.cpu_devices={fsdp * tensor}",
        f"model.layers={layers}",
        f"remat.policy={remat}",
    )
    layout = lay_out(config, jax.devices()[: fsdp * tensor])
    return Program(
        lambda: make_train_step(config, layout), abstract_state(config), random_batch(config)
    )


def main() -> int:
    rounds = parse_rounds(__doc__, default=3)
    start_jax(8)
    missed = 0
    for name, sizes in MESHES.items():
        deep, shallow = (program(layers, *sizes, "full") for layers in (DEEP, SHALLOW))
        costs = alternate(partial(compile_cold, deep), partial(compile_cold, shallow), rounds)
        kept = compile_cold(program(DEEP, *sizes, "none"))
        figures = [
            *ratios(f"compile {DEEP} layers / {SHALLOW}", costs, cpu=COMPILE_CPU),
            temp_ratio(f"{DEEP} layers, remat full / none", compile_cold(deep), kept, TEMP_BYTES),
        ]
        missed |= report(name, figures)
    return missed


if __name__ == "__main__":
    sys.exit(main())
