"""Ratios between two programs, measured in one process: rounds alternate, the median over rounds of
their ratio counts, and CPU-seconds (user and system time of all threads) stand beside wall seconds,
since other work on the machine moves the second far more than the first.
"""

from __future__ import annotations

import argparse
import operator
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

import meshwright
from meshwright.models.batch import Batch
from meshwright.trainer.config import Config


class Seconds(NamedTuple):
    cpu: float
    wall: float


class Program(NamedTuple):
    """A train step to measure. make() builds it, not compiled; state and batch are its first."""

    make: Callable[[], Any]
    state: Any
    batch: Batch


@dataclass(frozen=True)
class Figure:
    """One line of a report. bound: the largest value that passes, the smallest with `at_least`."""

    name: str
    value: float
    bound: float | None = None
    at_least: bool = False
    detail: str = ""


def parse_rounds(description: str | None, default: int) -> int:
    """The one option of these programs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=default, help=f"measured rounds (default {default})"
    )
    return parser.parse_args().rounds


def start_jax(devices: int) -> None:
    """Simulate devices on the CPU; every compilation is a real one."""
    meshwright.simulate_devices(devices)
    jax.config.update("jax_enable_compilation_cache", False)


def compile_cold(program: Program) -> Any:
    """The compiled step, traced, lowered and compiled with nothing remembered."""
    jax.clear_caches()
    return program.make().lower(program.state, program.batch).compile()


def stepper(compiled: Any, program: Program) -> Callable[[], Any]:
    """A call that makes one more step and returns its metrics."""
    state = program.state

    def call() -> Any:
        nonlocal state
        state, metrics = compiled(state, program.batch)
        return metrics

    return call


def temp_bytes(compiled: Any) -> int:
    """Scratch bytes of one device while the step runs."""
    return compiled.memory_analysis().temp_size_in_bytes


def timed(call: Callable[[], Any]) -> Seconds:
    """What one call costs until its arrays are there."""
    cpu, wall = time.process_time(), time.perf_counter()
    jax.block_until_ready(call())
    return Seconds(time.process_time() - cpu, time.perf_counter() - wall)


def alternate(
    first: Callable[[], Any], second: Callable[[], Any], rounds: int
) -> list[tuple[Seconds, Seconds]]:
    """Costs of both calls in each round, after one to warm up; the order changes every round."""
    calls, costs = (first, second), []
    for number in range(rounds + 1):
        cost = {index: timed(calls[index]) for index in ((0, 1) if number % 2 else (1, 0))}
        costs.append((cost[0], cost[1]))
    return costs[1:]


def ratios(
    name: str, costs: list[tuple[Seconds, Seconds]], cpu: float | None, wall: float | None = None
) -> list[Figure]:
    """First over second in CPU-seconds and in wall seconds, each with its bound."""
    figures = []
    for kind, bound in (("cpu", cpu), ("wall", wall)):
        pairs = [(getattr(a, kind), getattr(b, kind)) for a, b in costs]
        value = statistics.median(a / b for a, b in pairs)
        a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
        unit = "CPU-seconds" if kind == "cpu" else "wall seconds"
        figures.append(Figure(f"{name}, {unit}", value, bound, detail=f"{a:.3g} / {b:.3g}"))
    return figures


def temp_ratio(name: str, first: Any, second: Any, bound: float | None) -> Figure:
    a, b = temp_bytes(first), temp_bytes(second)
    detail = f"{a / 2**20:.1f} / {b / 2**20:.1f} MiB a device"
    return Figure(f"{name}, temp bytes", a / b, bound, detail=detail)


def report(title: str, figures: list[Figure]) -> int:
    """Print the table; the exit code, 1 where a bound is missed."""
    width = max(len(figure.name) for figure in figures)
    missed = 0
    print(title)
    for figure in figures:
        verdict = ""
        if figure.bound is not None:
            sign, holds = ("≥", operator.ge) if figure.at_least else ("≤", operator.le)
            passed = holds(figure.value, figure.bound)
            missed += not passed
            verdict = f"{sign} {figure.bound:<5g} {'PASS' if passed else 'over'}"
        print(f"  {figure.name:{width}} {figure.value:8.3f}  {verdict:13} {figure.detail}".rstrip())
    return 1 if missed else 0


def random_batch(config: Config) -> Batch:
    """Random rows [1, B, S] of two documents each, cut at a random token; on the host."""
    rng = np.random.default_rng(config.run.seed)
    rows, tokens = config.train.batch_size, config.train.seq_len
    ids = rng.integers(0, config.model.vocab_size, (1, rows, tokens + 1), dtype=np.int32)
    cut = rng.integers(1, tokens, (1, rows, 1), dtype=np.int32)
    place = np.arange(tokens, dtype=np.int32)[None, None, :]
    second = place >= cut
    return Batch(
        tokens=ids[..., :-1],
        targets=ids[..., 1:],
        weights=(place != cut - 1).astype(np.float32),
        positions=place - cut * second,
        segments=second.astype(np.int32),
    )
