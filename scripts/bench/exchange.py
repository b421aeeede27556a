"""What the text of the compiled step of preset `moe` says of experts shared out over eight devices:
bytes of all-to-alls beside the spec's formula, and a device's work beside that of one alone.

Without a capacity both are more: two of nine products are formed twice, since rows come again
instead of being kept, and rounds have a quarter more room than an even load needs.
"""

from __future__ import annotations

import math
import re
import sys

import jax
from measure import Figure, report, start_jax

from meshwright import load
from meshwright.models.layers.moe import expert_limit
from meshwright.sharding.exchange import exchange_rows
from meshwright.sharding.grouped import block_sizes
from meshwright.trainer.config import Config
from meshwright.trainer.inspect import hlo
from meshwright.trainer.state import lay_out
from meshwright.trainer.step import make_train_step, step_shapes

DEVICES = 8
ONE_DEVICE = ("mesh.fsdp=1", "mesh.expert=1", "mesh.tensor=1", "device.cpu_devices=1")
SHARED = ("mesh.fsdp=1", f"mesh.expert={DEVICES}", "mesh.tensor=1")


def main() -> int:
    start_jax(DEVICES)
    preset, figures = load("moe", *ONE_DEVICE), []
    alone = expert_flops(step_text(preset), preset, 1)
    for name, overrides, most_sent, most_done in (
        (
            "capacity 1",
            ("model.moe.capacity_factor=1.0", "model.moe.routing_group=128"),
            1.02,
            1 / 8,
        ),
        ("dropless, one round", (), 1.6, 0.153),
    ):
        config = load("moe", *SHARED, *overrides)
        text = step_text(config)
        sent, done = all_to_all_bytes(text, config), expert_flops(text, config, DEVICES)
        assert DEVICES * done >= alone, "the text holds less than the work there is"
        rows = config.model.moe.experts_per_token * config.train.batch_size * config.train.seq_len
        sends = rows // DEVICES * config.model.d_model * 4 * (DEVICES - 1) // DEVICES
        formula = 2 * 2 * config.model.layers * sends
        assert sent >= formula, "the text holds less than what must travel"
        moved = f"{sent / 2**20:.2f} / {formula / 2**20:.2f} MiB a device"
        work = f"{done / 1e6:.0f} / {alone / 1e6:.0f} MFLOP, even load"
        title = f"{name}: all-to-alls / 2 · 2·k·T·h·(P-1)/P"
        figures.append(Figure(title, sent / formula, most_sent, detail=moved))
        title = f"{name}: expert FLOPs of a device / of one alone"
        figures.append(Figure(title, done / alone, most_done, detail=work))
    return report(f"preset `moe` on {DEVICES} devices, expert={DEVICES}, a step", figures)


def step_text(config: Config) -> str:
    layout = lay_out(config, jax.devices()[: math.prod(config.mesh.sizes().values())])
    step = make_train_step(config, layout)
    return step.lower(*step_shapes(config, layout)).compile().as_text()


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
    assert model.moe.experts is not None
    choices, row = tokens * model.moe.experts_per_token, 2 * model.d_model * model.expert_width
    share, arriving = choices // model.moe.experts, choices
    if devices > 1:
        limit = expert_limit(tokens // devices, config.model)
        arriving = devices * exchange_rows(choices // devices, model.moe.experts, devices, limit)
    blocks = block_sizes(arriving, model.moe.experts // devices)
    steps, trips = -(-share // blocks[-1]), {}
    for rows in blocks:
        trips[rows], steps = divmod(steps, rows // blocks[-1])

    def of_computation(name: str, times: int, inside: bool) -> int:
        total = 0
        for instruction in computations[name].values():
            if inside and instruction.opcode == "dot":
                rows, rest = divmod(dot_flops(instruction, computations[name]), row)
                total += times * rows * row * trips[rows] if not rest else 0
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


if __name__ == "__main__":
    sys.exit(main())
