"""Experts on one device beside a dense model of equal active FLOPs, a grouped matmul beside one
dense matmul of the same rows, and the memory of 64 experts.

Ratios, so that below 1 experts are cheaper; the grouped matmul, forward and backward, is the share
of the dense one's FLOP rate. The first step's router is not trained: its load is uneven. The larger
model has few tokens for its parameters (1,024 for 8 million), so that its step pays for reading and
writing four times a dense MLP's; loss and gradients alone leave the optimizer out.
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
from meshwright.sharding.grouped import Groups, Weights, group_rows, grouped_linear
from meshwright.trainer.config import Config
from meshwright.trainer.inspect import hlo
from meshwright.trainer.state import init_state, lay_out
from meshwright.trainer.step import make_train_step, shard_loss_and_grads

ROWS, WIDTH, HIDDEN, EXPERTS = 2048, 128, 256, 16
ONE_DEVICE = ("mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1", "device.cpu_devices=1")
DENSE, MOE = ("tiny", *ONE_DEVICE), ("moe", "mesh.expert=1", *ONE_DEVICE)
LARGER = ("model.d_model=256", "model.d_ff=768", "train.batch_size=8")


def main() -> int:
    rounds = parse_rounds(__doc__, default=7)
    start_jax(1)
    presets = load(*MOE), load(*DENSE)
    name = "preset `moe` / `tiny`, a step"
    experts, missed = compare(name, step_of, *presets, rounds, bound=1.25)
    larger = load(*MOE, *LARGER, "model.moe.d_ff=384"), load(*DENSE, *LARGER)
    compare("d_model 256, a step", step_of, *larger, rounds)
    compare("d_model 256, loss and gradients alone", gradients_of, *larger, rounds)
    return missed | memory(experts) | grouped(10 * rounds)


def step_of(config: Config) -> Program:
    layout = lay_out(config)
    batch = jax.device_put(random_batch(config), layout.sharding(layout.batch_spec()))
    return Program(lambda: make_train_step(config, layout), init_state(config, layout), batch)


def gradients_of(config: Config) -> Program:
    """The same without the optimizer: the state is given back as it came."""
    layout, program = lay_out(config), step_of(config)
    gradients = shard_loss_and_grads(config, layout, program.state.params)

    def of_state(state: Any, batch: Any) -> Any:
        return state, gradients(state.params, batch)

    return program._replace(make=lambda: jax.jit(of_state, donate_argnums=0))


def compare(
    name: str, program_of: Any, moe: Config, dense: Config, rounds: int, bound: float | None = None
) -> tuple[Any, int]:
    """The program with experts, compiled, and whether its bound was missed."""
    programs = program_of(moe), program_of(dense)
    compiled = [compile_cold(program) for program in programs]
    costs = alternate(*map(stepper, compiled, programs), rounds)
    return compiled[0], report(name, ratios("experts / dense", costs, cpu=bound))


def memory(experts: Any) -> int:
    """Of the preset with 64 experts, whose largest array is to be far from one that has dims of
    tokens, experts and their capacity k·T/E: k·T² elements.
    """
    config = load(*MOE, "model.moe.experts=64")
    many = compile_cold(step_of(config))
    tokens = config.train.batch_size * config.train.seq_len
    largest = max(array.elements for array in hlo.arrays(many.as_text()))
    room = config.model.moe.experts_per_token * tokens**2
    detail = f"{largest / 2**20:.1f} / {room / 2**20:.1f} Mi elements"
    figures = [
        temp_ratio("64 experts / 8", many, experts, bound=None),
        Figure("largest array / [tokens, experts, capacity]", largest / room, 0.25, detail=detail),
    ]
    return report("preset `moe`, memory of a step", figures)


def grouped(rounds: int) -> int:
    """The matmul of rows that stand by expert, which has the bound; and of tokens in a random order
    of experts, which are sorted, moved there and back.
    """
    layout = lay_out(load(*MOE))
    x, weight, choice = (
        jax.random.normal(jax.random.key(0), (ROWS, WIDTH)),
        jax.random.normal(jax.random.key(1), (EXPERTS, WIDTH, HIDDEN)),
        jax.random.randint(jax.random.key(2), (ROWS,), 0, EXPERTS),
    )
    groups = group_rows(choice, EXPERTS)
    rows = jnp.pad(x, ((0, groups.choices.shape[0] - ROWS), (0, 0)))

    def plain(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.sum((x @ weight) ** 2)

    def by_expert(x: jax.Array, weight: jax.Array, groups: Groups) -> jax.Array:
        (y,) = grouped_linear(x, Weights((weight,), ((),)), groups, layout)
        return jnp.sum(y**2)

    def moved(x: jax.Array, weight: jax.Array, choice: jax.Array) -> jax.Array:
        groups, weights = group_rows(choice, EXPERTS), Weights((weight,), ((),))
        (y,) = grouped_linear(x, weights, groups, layout, enter=True, leave=ROWS)
        return jnp.sum(y**2)

    dense, alone, whole = (jax.jit(jax.grad(f, argnums=(0, 1))) for f in (plain, by_expert, moved))
    figures = []
    for name, bound, call in (
        ("dense / grouped", 0.6, lambda: alone(rows, weight, groups)),
        ("dense / grouped with its moves", None, lambda: whole(x, weight, choice)),
    ):
        costs = alternate(lambda: dense(x, weight[0]), call, rounds)
        cpu, wall = ratios(name, costs, cpu=None)
        figures += [Figure(cpu.name, cpu.value, bound, at_least=True, detail=cpu.detail), wall]
    return report(f"{ROWS} rows, {WIDTH} × {HIDDEN}, {EXPERTS} experts", figures)


if __name__ == "__main__":
    sys.exit(main())
