"""What the training loop costs: tokens per second of `train` on the preset tiny over those of its
compiled step alone, fed one batch again and again. Both run in this process, in turns; the first
updates of each run are left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
from measure import Figure, Program, parse_rounds, random_batch, report, stepper

from meshwright import load, train
from meshwright.trainer.config import Config
from meshwright.trainer.runtime.devices import prepare_devices
from meshwright.trainer.state import init_state, lay_out
from meshwright.trainer.step import make_train_step

BOUND = 0.97
STEPS, WARM_UP = 120, 20


def train_times(config: Config, name: str) -> list[float]:
    """Seconds of each update of a whole run, as it logs them."""
    run = dataclasses.replace(config.run, name=name)
    with contextlib.redirect_stdout(io.StringIO()):
        result = train(dataclasses.replace(config, run=run))
    return [line["step_time"] for line in result.history if "step_time" in line]


def bare_times(step: Callable[[], Any]) -> list[float]:
    """Seconds of each step; as in the loop, a step is waited for when the next is on its way."""
    done = [time.perf_counter()]
    for metrics, _ in itertools.pairwise(step() for _ in range(STEPS + 1)):
        jax.block_until_ready(metrics)
        done.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(done)]


def bare_step(config: Config) -> Callable[[], Any]:
    layout = lay_out(config)
    batch = jax.device_put(random_batch(config), layout.sharding(layout.batch_spec()))
    program = Program(lambda: make_train_step(config, layout), init_state(config, layout), batch)
    return stepper(program.make().lower(program.state, batch).compile(), program)


def main() -> int:
    rounds = parse_rounds(__doc__, default=5)
    with tempfile.TemporaryDirectory() as folder:
        cache = f"device.compile_cache={folder}/programs"
        config = load("tiny", f"train.steps={STEPS}", f"run.dir={folder}/runs", cache)
        prepare_devices(config)
        step = bare_step(config)
        times = [
            (train_times(config, f"run-{number}")[WARM_UP:], bare_times(step)[WARM_UP:])
            for number in range(rounds)
        ]
    figures = []
    for name, take in (("median update", statistics.median), ("all updates", statistics.mean)):
        pairs = [(take(run), take(bare)) for run, bare in times]
        ratio = statistics.median(bare / run for run, bare in pairs)
        run, bare = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
        detail = f"{run:.1f} / {bare:.1f} ms an update"
        figures.append(Figure(f"tokens per second, {name}", ratio, BOUND, True, detail))
    return report(f"train tiny / its bare step, updates {WARM_UP + 1} to {STEPS}", figures)


if __name__ == "__main__":
    sys.exit(main())
