"""Experts beside a dense model of equal active FLOPs, a grouped matmul beside one dense matmul of
the same rows, and what the text of compiled steps says of 64 experts' memory, of the bytes that
all-to-alls send and of the work that sharing experts out leaves a device.

Ratios, so that below 1 experts are cheaper; the grouped matmul, forward and backward, is the share
of the dense one's FLOP rate. The first step's router is not trained: its load is uneven. The larger
model has few tokens for its parameters (1,024 for 8 million), so that its step pays for reading and
writing four times a dense MLP's; loss and gradients alone leave the optimizer out.
"""

from __future__ import annotations

import math
import re
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
from meshwright.models.moe import expert_limit
from meshwright.sharding import hlo
from meshwright.sharding.exchange import exchange_rows
from meshwright.sharding.grouped import Weights, block_sizes, group_rows, grouped_linear
from meshwright.trainer.config import Config
from meshwright.trainer.state import init_state, lay_out
from meshwright.trainer.step import make_train_step, shard_loss_and_grads

ROWS, WIDTH, HIDDEN, EXPERTS = 2048, 128, 256, 16
DEVICES = 8
ONE_DEVICE = ("mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1", "device.cpu_devices=1")
DENSE, MOE = ("tiny", *ONE_DEVICE), ("moe", "mesh.expert=1", *ONE_DEVICE)
SHARED = ("moe", "mesh.fsdp=1", f"mesh.expert={DEVICES}", "mesh.tensor=1")
LARGER = ("model.d_model=256", "model.d_ff=768", "train.batch_size=8")


def main() -> int:
    rounds = parse_rounds(__doc__, default=7)
    start_jax(DEVICES)
    preset, dense = load(*MOE), load(*DENSE)
    experts, missed = compare("preset `moe` / `tiny`, a step", step_of, preset, dense, rounds)
    larger = load(*MOE, *LARGER, "model.expert_d_ff=384"), load(*DENSE, *LARGER)
    compare("d_model 256, a step", step_of, *larger, rounds, bound=None)
    compare("d_model 256, loss and gradients alone", gradients_of, *larger, rounds, bound=None)
    return missed | memory(experts) | exchange(preset, experts) | grouped(rounds)


def step_of(config: Config, devices: int = 1) -> Program:
    layout = lay_out(config, jax.devices()[:devices])
    batch = jax.device_put(random_batch(config), layout.sharding(layout.batch_spec()))
    return Program(lambda: make_train_step(config, layout), init_state(config, layout), batch)


def gradients_of(config: Config) -> Program:
    """The same without the optimizer: the state is given back as it came."""
    layout, program = lay_out(config, jax.devices()[:1]), step_of(config)
    gradients = shard_loss_and_grads(config, layout, program.state.params)

    def of_state(state: Any, batch: Any) -> Any:
        return state, gradients(state.params, batch)

    return program._replace(make=lambda: jax.jit(of_state, donate_argnums=0))


def compare(
    name: str, program_of: Any, moe: Config, dense: Config, rounds: int, bound: float | None = 1.25
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
    config = load(*MOE, "model.experts=64")
    many = compile_cold(step_of(config))
    tokens = config.train.batch_size * config.train.seq_len
    largest = max(array.elements for array in hlo.arrays(many.as_text()))
    room = config.model.experts_per_token * tokens**2
    detail = f"{largest / 2**20:.1f} / {room / 2**20:.1f} Mi elements"
    figures = [
        temp_ratio("64 experts / 8", many, experts, bound=None),
        Figure("largest array / [tokens, experts, capacity]", largest / room, 0.25, detail=detail),
    ]
    return report("preset `moe`, memory of a step", figures)


def exchange(preset: Config, experts: Any) -> int:
    """Experts shared out over all devices, beside spec's formula and beside one device. Without a
    capacity two of nine products are formed twice, since rows come again instead of being kept.
    """
    alone = expert_flops(experts.as_text(), preset, 1)
    figures = []
    for name, overrides, most_sent, most_done in (
        ("capacity 1", ("model.capacity=1.0", "model.routing_group=128"), 1.02, 1 / 8),
        ("dropless, one round", (), 1.6, 0.153),
    ):
        config = load(*SHARED, *overrides)
        text = compile_cold(step_of(config, DEVICES)).as_text()
        sent, done = all_to_all_bytes(text, config), expert_flops(text, config, DEVICES)
        rows = config.model.experts_per_token * config.train.batch_size * config.train.seq_len
        sends = rows // DEVICES * config.model.d_model * 4 * (DEVICES - 1) // DEVICES
        formula = 2 * 2 * config.model.layers * sends
        moved = f"{sent / 2**20:.2f} / {formula / 2**20:.2f} MiB a device"
        work = f"{done / 1e6:.0f} / {alone / 1e6:.0f} MFLOP, even load"
        title = f"{name}: all-to-alls / 2 · 2·k·T·h·(P-1)/P"
        figures.append(Figure(title, sent / formula, most_sent, detail=moved))
        title = f"{name}: expert FLOPs of a device / of one alone"
        figures.append(Figure(title, done / alone, most_done, detail=work))
    return report(f"preset `moe` on {DEVICES} devices, expert={DEVICES}, a step", figures)


def all_to_all_bytes(text: str, config: Config) -> int:
    """Sent by a device, of rounds, whose number is not in the text, one a layer."""
    mesh = config.mesh.sizes()
    return sum(
        collective.sent * collective.times
        for collective in hlo.read_program(text, mesh).collectives
        if collective.kind == "all-to-all"
    )


def expert_flops(text: str, config: Config, devices: int) -> int:
    """Of a device's products in loops over blocks, each expert having its even share of rows: how
    often those loops run is data, how often all around them do is in the text.
    """
    computations, entry = hlo.parse(text)
    model, tokens = config.model, config.train.batch_size * config.train.seq_len
    assert model.experts is not None
    choices, row = tokens * model.experts_per_token, 2 * model.d_model * model.expert_width
    share, arriving = choices // model.experts, choices
    if devices > 1:
        limit = expert_limit(tokens // devices, config.model)
        arriving = devices * exchange_rows(choices // devices, model.experts, devices, limit)
    blocks = block_sizes(arriving, model.experts // devices)
    steps, trips = -(-share // blocks[-1]), {}
    for rows in blocks:
        trips[rows], steps = divmod(steps, rows // blocks[-1])

    def of_computation(name: str, times: int, inside: bool) -> int:
        total = 0
        for instruction in computations[name].values():
            if inside and instruction.opcode == "dot":
                rows, rest = divmod(dot_flops(instruction, computations[name]), row)
                total += times * rows * row * trips.get(rows, 0) if not rest else 0
            for callee, count in hlo.calls(instruction, computations[name], computations):
                known = 1 if count is None else count
                total += of_computation(callee, times * known, inside or count is None)
        return total

    return of_computation(entry, 1, False)


def dot_flops(dot: hlo.Instruction, computation: hlo.Computation) -> int:
    (result,), (given, *_) = hlo.arrays(dot.type), hlo.arrays(computation[dot.operands[0]].type)
    dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.attributes)
    assert dims is not None
    return 2 * result.elements * math.prod(given.dims[int(dim)] for dim in dims[1].split(","))


def grouped(rounds: int) -> int:
    """Rows in a random order of experts, moved to blocks and back, and multiplied."""
    layout = lay_out(load(*MOE), jax.devices()[:1])
    x, weight, choice = (
        jax.random.normal(jax.random.key(0), (ROWS, WIDTH)),
        jax.random.normal(jax.random.key(1), (EXPERTS, WIDTH, HIDDEN)),
        jax.random.randint(jax.random.key(2), (ROWS,), 0, EXPERTS),
    )

    def by_expert(x: jax.Array, weight: jax.Array, choice: jax.Array) -> jax.Array:
        groups, weights = group_rows(choice, EXPERTS), Weights((weight,), ((),))
        (y,) = grouped_linear(x, weights, groups, layout, enter=True, leave=ROWS)
        return jnp.sum(y**2)

    def plain(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.sum((x @ weight) ** 2)

    one = weight[0]
    both = jax.jit(jax.grad(by_expert, argnums=(0, 1))), jax.jit(jax.grad(plain, argnums=(0, 1)))
    costs = alternate(lambda: both[1](x, one), lambda: both[0](x, weight, choice), rounds)
    (cpu, wall) = ratios("dense / grouped", costs, cpu=None)
    bounded = Figure(cpu.name, cpu.value, 0.6, at_least=True, detail=cpu.detail)
    return report(f"{ROWS} rows, {WIDTH} × {HIDDEN}, {EXPERTS} experts", [bounded, wall])


if __name__ == "__main__":
    sys.exit(main())
