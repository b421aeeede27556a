"""Experts on one device: a grouped matmul beside one dense matmul of the same rows, a step of
experts beside one of a dense model of equal active FLOPs, and the memory of 64 experts beside 8.

Ratios, so that below 1 experts are cheaper; the grouped matmul, forward and backward, is the share
of the dense one's FLOP rate. The first step's router is not trained: its load is uneven.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
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
from meshwright.sharding.grouped import Weights, collect, group_rows, grouped_linear, spread
from meshwright.trainer.state import init_state, lay_out
from meshwright.trainer.step import make_train_step

ROWS, WIDTH, HIDDEN, EXPERTS = 2048, 128, 256, 16
ONE_DEVICE = ("mesh.fsdp=1", "mesh.expert=1", "mesh.tensor=1", "device.cpu_devices=1")
LARGER = ("model.d_model=256", "model.d_ff=768", "train.batch_size=8")


def main() -> int:
    rounds = parse_rounds(__doc__, default=7)
    start_jax(1)
    dense, experts, many = (
        step_of(*model, *ONE_DEVICE)
        for model in (
            ("tiny", *LARGER, "mesh.data=1"),
            ("moe", *LARGER, "model.expert_d_ff=384"),
            ("moe", *LARGER, "model.expert_d_ff=384", "model.experts=64"),
        )
    )
    compiled = [compile_cold(program) for program in (dense, experts, many)]
    costs = alternate(stepper(compiled[1], experts), stepper(compiled[0], dense), rounds)
    missed = report(
        "a step of 8 experts, 2 of them for a token / of a dense model of equal active FLOPs",
        ratios("step", costs, cpu=1.25),
    )
    figure = temp_ratio("64 experts / 8", compiled[2], compiled[1], bound=None)
    return missed | report("memory of a step", [figure]) | grouped(rounds)


def step_of(name: str, *overrides: str) -> Program:
    config = load(name, *overrides)
    layout = lay_out(config)
    batch = jax.device_put(random_batch(config), layout.sharding(layout.batch_spec()))
    return Program(lambda: make_train_step(config, layout), init_state(config, layout), batch)


def grouped(rounds: int) -> int:
    """Rows in a random order of experts, moved to blocks and back, and multiplied."""
    layout = lay_out(load("moe", *ONE_DEVICE))
    x, weight, choice = (
        jax.random.normal(jax.random.key(0), (ROWS, WIDTH)),
        jax.random.normal(jax.random.key(1), (EXPERTS, WIDTH, HIDDEN)),
        jax.random.randint(jax.random.key(2), (ROWS,), 0, EXPERTS),
    )

    def by_expert(x: jax.Array, weight: jax.Array, choice: jax.Array) -> jax.Array:
        groups = group_rows(choice, EXPERTS)
        rows = spread(x, groups.choices, groups.slots, 1)
        (y,) = grouped_linear(rows, Weights((weight,), ((),)), groups, layout)
        moved: Any = collect(y, groups.choices, groups.slots, 1)
        return jnp.sum(moved**2)

    def plain(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.sum((x @ weight) ** 2)

    both = jax.jit(jax.grad(by_expert, argnums=(0, 1))), jax.jit(jax.grad(plain, argnums=(0, 1)))
    costs = alternate(lambda: both[1](x, weight[0]), lambda: both[0](x, weight, choice), rounds)
    (cpu, wall) = ratios("dense / grouped", costs, cpu=None)
    bounded = Figure(cpu.name, cpu.value, 0.6, at_least=True, detail=cpu.detail)
    return report(f"{ROWS} rows, {WIDTH} × {HIDDEN}, {EXPERTS} experts", [bounded, wall])


if __name__ == "__main__":
    sys.exit(main())
