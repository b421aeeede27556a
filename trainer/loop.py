"""A training run from config to result: the run folder, the loop, evaluations, checkpoints."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax

from ..models.batch import Batch
from .checkpoint import open_checkpoints, save
from .config import Config
from .console import report_steps
from .data.loader import batch_at, prefetch, train_rows
from .data.store import open_data
from .device import prepare_devices
from .evaluate import counting_levels, describe_evaluation, evaluate
from .flops import mfu, peak_flops, step_flops
from .load import to_yaml
from .metrics import plot_loss, write_line
from .state import State, abstract_state, init_state, lay_out
from .step import make_eval_step, make_train_step
from .summary import summarize


class RunError(RuntimeError):
    """The run cannot go on; the message says at which step and why."""


@dataclass(frozen=True)
class Result:
    """What a run gives back. history: objects of metrics.jsonl; levels: entropies of counting."""

    folder: Path
    config: Config = field(repr=False)
    history: list[dict[str, Any]] = field(repr=False)
    levels: dict[str, float]
    state: State = field(repr=False)

    def plot(self):
        """The loss picture as a matplotlib figure."""
        return plot_loss(self.history, self.levels)


def train(config: Config) -> Result:
    """Train `config` to its end in a new run folder, and evaluate it.

    Raises ValueError where config, devices, data or folder are not usable, before any compilation;
    RunError when the loss stops being finite.
    """
    prepare_devices(config.device)
    layout = lay_out(config)
    folder = make_run_folder(config)
    try:
        store = open_data(config)
    except BaseException:
        shutil.rmtree(folder)  # the run has not begun
        raise
    (folder / "data.json").write_text(json.dumps(store.description.made_from, indent=1))

    steps, history, levels = config.train.steps, [], counting_levels(store)
    read_batch = partial(
        batch_at,
        train_rows(store.train, config.train.seq_len, config.run.seed),
        batch_size=config.train.batch_size,
        microbatches=config.train.microbatches,
        seq_len=config.train.seq_len,
        sharding=layout.sharding(layout.batch_spec()),
    )
    peak, flops = peak_flops(config), step_flops(config)

    with (
        (folder / "metrics.jsonl").open("x", encoding="utf-8") as log,
        open_checkpoints(folder, config.checkpoint) as checkpoints,
        report_steps(steps, config.log.every) as reporter,
        closing(prefetch(read_batch, 0, config.train.batch_size, config.data.prefetch)) as batches,
    ):

        def record(values: dict[str, Any]) -> None:
            history.append(values)
            write_line(log, values)

        def record_step(metrics: dict[str, Any], seconds: float) -> None:
            first = ("step", "position", "loss")  # the rest in jit's order
            values = {name: metrics[name].item() for name in (*first, *metrics)}
            values |= {
                "tokens": int(values["tokens"]),
                "step_time": seconds,
                "tokens_per_second": values["tokens"] / seconds,
                "mfu": mfu(flops, seconds, layout.mesh.size, peak),
            }
            record(values)
            if not math.isfinite(values["loss"]) or not math.isfinite(values["grad_norm"]):
                raise RunError(
                    f"step {values['step']}: loss {values['loss']}, gradient norm "
                    f"{values['grad_norm']}, at data position {values['position']}; "
                    f"lower optimizer.lr={config.optimizer.lr} or lengthen optimizer.warmup"
                )
            reporter.step(values)

        shapes = abstract_state(config)
        for line in summarize(config, layout, shapes):
            reporter.say(line)
        reporter.say(f"run         {folder}")
        reporter.say("compiling   the step")
        step = make_train_step(config, layout).lower(shapes, read_batch(0)).compile()
        state = init_state(config, layout)
        eval_step = make_eval_step(config, layout)

        done = 0
        while done < steps:
            stop = next_stop(done, steps, config.train.eval_every, config.checkpoint.every)
            state = run_steps(step, state, islice(batches, stop - done), record_step)
            done = stop
            # saved first: an evaluation may fail
            if done == steps or is_due(done, config.checkpoint.every):
                save(checkpoints, done, state)
            if done == steps or is_due(done, config.train.eval_every):
                result = evaluate(eval_step, state.params, store.heldout, config, layout)
                record({"step": done, "eval_loss": result.loss, "eval_targets": result.targets})
                reporter.say(f"step {done}: {describe_evaluation(result, levels)}")

    plot_loss(history, levels, folder / "loss.png")
    reporter.say(f"done: checkpoint, metrics.jsonl and loss.png are in {folder}")
    return Result(folder, config, history, levels, state)


def run_steps(
    step: Callable[[State, Batch], tuple[State, dict[str, jax.Array]]],
    state: State,
    batches: Iterable[tuple[int, Batch]],
    record: Callable[[dict[str, Any], float], None],
) -> State:
    """Step through `batches`. A step's metrics are fetched after the next one is dispatched, so
    the devices never wait for the host; `record` gets them with the seconds since the last fetch.
    """
    pending, last = None, time.perf_counter()

    def fetch(metrics: dict[str, jax.Array]) -> None:
        nonlocal last
        values, now = jax.device_get(metrics), time.perf_counter()
        record(values, now - last)
        last = now

    for _, batch in batches:
        state, metrics = step(state, batch)
        if pending is not None:
            fetch(pending)
        pending = metrics
    if pending is not None:
        fetch(pending)
    return state


def is_due(step: int, every: int) -> bool:
    """Whether something done every `every` updates (0: never) is due after `step` of them."""
    return every > 0 and step % every == 0


def next_stop(done: int, steps: int, *periods: int) -> int:
    """The next update, at most `steps`, after which anything of these periods is due."""
    return min([steps, *(done + every - done % every for every in periods if every > 0)])


def make_run_folder(config: Config) -> Path:
    """Create run.dir/run.name with the resolved config in it. Raises ValueError if it exists."""
    folder = Path(os.path.expanduser(config.run.dir), config.run.name)
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ValueError(
            f"{folder} exists already; write run.name=… for a new run, or delete it"
        ) from None
    except OSError as error:
        raise ValueError(f"run.dir={config.run.dir}: {error.strerror}: {folder}") from None
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    return folder
