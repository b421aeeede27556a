"""A training run from config to result: the loop, its evaluations, checkpoints and stops."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax

from ..models.batch import Batch
from ..models.pattern import held
from ..models.position import position_number
from .config import Config
from .data.loader import batch_at, batch_shapes, placed, prefetch, train_rows
from .evaluate import counting_levels, describe_evaluation, evaluate, heldout_batches
from .generate import generate_texts
from .inspect.flops import mfu, peak_flops, step_flops
from .log.console import decoration
from .log.metrics import plot_expert_load, plot_loss
from .log.nonfinite import describe_attempt, how_to_calm, why_it_ends
from .runtime.processes import is_first
from .runtime.stop import Stopped, in_background, until_stopped
from .sampling import Sampling
from .start import Run, prepare_run
from .state import (
    State,
    eval_params,
    sharded_shapes,
)
from .step import make_eval_step, make_train_step, step_shapes


class RunError(RuntimeError):
    """The run cannot go on; the message says at which step and why."""


@dataclass(frozen=True)
class Result:
    """What a run gives back."""

    folder: Path
    config: Config = field(repr=False)
    history: list[dict[str, Any]] = field(repr=False)
    """the objects of metrics.jsonl"""
    levels: dict[str, float]
    """losses of models that only count, to hold a run's against: see `entropy.py`"""
    state: State = field(repr=False)

    def plot(self, path: Path | None = None):
        """The loss picture as a matplotlib figure; saved where a path is given."""
        return plot_loss(self.history, self.levels, path)

    def plot_experts(self, path: Path | None = None):
        """That of experts' load. Raises ValueError where the model has no experts."""
        numbers = held(self.config.model).get("moe", [])
        return plot_expert_load(self.history, numbers, path)


def train(config: Config) -> Result:
    """Train `config` to its end and evaluate it; checkpoint.resume says whether an existing run
    goes on.

    SIGTERM, SIGHUP and Ctrl-C end the run early: it saves a checkpoint and raises Stopped.

    Raises ValueError where config, devices, data or folder are not usable, before any compilation;
    RunError when too many attempts in a row were not finite, CheckpointError when the disk refuses
    a checkpoint, DamagedError when the one to resume from is not what was saved.
    """
    with prepare_run(config) as (run, state):
        state = run_to_end(run, state)
        history, levels = run.metrics.history, counting_levels(run.store)
        result = Result(run.folder, run.config, history, levels, state)
        pictures: dict[str, Callable[[Path], Any]] = {"loss.png": result.plot}
        if any("expert_load" in line for line in history):
            pictures["experts.png"] = result.plot_experts
        drawn = []
        for name, draw in pictures.items() if is_first() else ():
            with decoration(name, run.reporter.say):
                draw(run.folder / name)
                drawn.append(name)
        *files, last = "checkpoint", "metrics.jsonl", *drawn
        run.reporter.say(f"done: {', '.join(files)} and {last} are in {run.folder}")
    return result


def run_to_end(run: Run, state: State) -> State:
    """Step, save and evaluate until train.steps updates are done; then let the model speak.

    Raises Stopped, with a checkpoint committed, when the run is asked to stop.
    """
    train, every = run.config.train, run.config.checkpoint.every
    losses, done = run.checkpoints.losses, int(state.step)
    step = eval_step = None
    with closing(train_batches(run, position_number(state.position))) as batches:
        try:
            while True:
                # a checkpoint that was due came first: an evaluation may fail
                due = done == train.steps or is_due(done, train.eval_every)
                if due and done not in losses and run.store.heldout is not None:
                    eval_step = eval_step or compile_eval_step(run)
                    losses[done] = evaluate_heldout(run, eval_step, state, done)
                if done == train.steps:
                    break
                step = step or compile_train_step(run)
                until = next_stop(done, train.steps, train.eval_every, every)
                while done < until:  # again where attempts were skipped
                    coming = read(run, islice(batches, until - done), done)
                    record = partial(record_step, run)
                    state, stopped = run_steps(step, state, coming, record)
                    done = int(state.step)
                    if stopped:
                        raise Stopped
                if done == train.steps or is_due(done, every):
                    save(run, state, done)
            if step is not None:
                show_sample(run, state)
        except Stopped:
            run.reporter.say(f"stopping    saving step {done}")
            save(run, state, done)
            wait_for_checkpoint(run)
            raise Stopped(
                f"stopped: step {done} is saved in {run.folder}; "
                f"checkpoint.resume=auto goes on from there"
            ) from None
    wait_for_checkpoint(run)
    return state


def show_sample(run: Run, state: State) -> None:
    """Print what the model makes of log.sample, or why it makes nothing. Raises Stopped as
    `compile_train_step` does; of several processes, what JAX says where another is lost.
    """
    if (prompt := run.config.log.sample) is None:
        return
    run.phase(None)  # it is compiled first
    tokenizer, sampling = run.store.tokenizer, Sampling(seed=run.config.run.seed)
    arguments = eval_params(state), run.config, run.layout, tokenizer, [prompt], sampling
    lost = jax.errors.JaxRuntimeError if jax.process_count() > 1 else Stopped
    with decoration("sample", run.reporter.say, but=lost):
        texts = run.wait(in_background(lambda: generate_texts(*arguments, buffers=state.buffers)))
        run.reporter.say(f"sample      {prompt}{texts[0]}")


def wait_for_checkpoint(run: Run) -> None:
    """Wait until the last checkpoint is committed. Raises RunError where that has failed."""
    run.phase(None)
    run.checkpoints.wait()
    if run.checkpoints.lost:
        raise RunError(f"the newest checkpoint is of step {run.checkpoints.newest}, not the last")


def run_steps(
    step: Callable[[State, Batch], tuple[State, dict[str, jax.Array]]],
    state: State,
    batches: Iterable[Batch],
    record: Callable[[dict[str, Any], float], None],
) -> tuple[State, bool]:
    """Step through `batches`, to their end or until they raise Stopped; returns the state and
    whether they did. A step's metrics are fetched after the next one is dispatched, so the devices
    never wait for the host; `record` gets them with the seconds since the last fetch.
    """
    pending, stopped, last = None, False, time.perf_counter()

    def fetch(metrics: dict[str, jax.Array]) -> None:
        nonlocal last
        values, now = jax.device_get(metrics), time.perf_counter()
        record(values, now - last)
        last = now

    try:
        for batch in batches:
            state, metrics = step(state, batch)
            if pending is not None:
                fetch(pending)
            pending = metrics
    except Stopped:
        stopped = True
    if pending is not None:
        fetch(pending)
    return state, stopped


def read(run: Run, futures: Iterable[Future[Batch]], done: int) -> Iterator[Batch]:
    """The batches of the next updates. Raises Stopped where the run is asked to stop, in the middle
    of the wait for one if it runs alone.
    """

    def batches() -> Iterator[Batch]:
        for number, future in enumerate(futures, done + 1):
            run.phase(f"reading the batch of step {number}")
            batch = run.wait(future)
            run.phase(f"in step {number}")
            yield batch

    return until_stopped(batches(), run.agreement)


def record_step(run: Run, metrics: dict[str, Any], seconds: float) -> None:
    """Write and show what an attempt measured; look after the last checkpoint. Raises RunError
    where it was skipped and no more may be.
    """
    nonfinite = metrics.pop("nonfinite", None)
    first = ("step", "position", "loss")  # the rest in jit's order
    values = {name: metrics[name].tolist() for name in (*first, *metrics)}
    flops, peak = step_flops(run.config), peak_flops(run.config)
    values |= {
        "position": position_number(metrics["position"]),
        "tokens": int(values["tokens"]) if math.isfinite(values["tokens"]) else None,
        "step_time": seconds,
        "tokens_per_second": values["tokens"] / seconds,
        "mfu": mfu(flops, seconds, run.layout.mesh.size, peak),
        "loss_scale": values.get("loss_scale"),
    }
    run.metrics.write(values)
    if math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"]):
        run.reporter.step(values)
    else:
        what = describe_attempt(values)
        if reason := why_it_ends(run.config, run.metrics.history, nonfinite):
            raise RunError(f"{what}; {reason}")
        run.reporter.say(f"{'skipped':<12}{what}")
    run.checkpoints.check()


def save(run: Run, state: State, done: int) -> None:
    run.phase(None)  # a disk may take its time
    run.metrics.sync()
    run.checkpoints.save(done, state)


def evaluate_heldout(run: Run, eval_step: Any, state: State, done: int) -> float:
    """Evaluate, record and show it; returns the loss. Raises Stopped as `read` does."""
    heldout = run.store.heldout
    assert heldout is not None

    def batches() -> Iterator[Batch]:
        for batch in heldout_batches(heldout, run.config, run.layout):
            run.phase(f"evaluating step {done}")
            yield batch

    coming = until_stopped(batches(), run.agreement)
    result = evaluate(eval_step, eval_params(state), coming, state.buffers)
    run.metrics.write({"step": done, "eval_loss": result.loss, "eval_targets": result.targets})
    described = describe_evaluation(result, counting_levels(run.store))
    run.reporter.say(f"step {done}: {described}")
    if not math.isfinite(result.loss):
        raise RunError(f"step {done}: held-out loss {result.loss}; {how_to_calm(run.config)}")
    return result.loss


def train_batches(run: Run, position: int) -> Generator[Future[Batch], None, None]:
    """The endless stream of training batches from a data position on."""
    train = run.config.train
    rows = train_rows(run.store.train, train.seq_len, run.config.run.seed)
    read_batch = partial(
        batch_at,
        placed(rows, train.seq_len, run.layout),
        batch_size=train.batch_size,
        microbatches=train.microbatches,
        seq_len=train.seq_len,
        sharding=run.layout.sharding(run.layout.batch_spec()),
    )
    return prefetch(read_batch, position, train.batch_size, run.config.data.prefetch)


def compile_train_step(run: Run) -> Any:
    """The train step, compiled. Raises Stopped in the middle, where the run is alone."""
    run.reporter.say("compiling   the step")
    step = make_train_step(run.config, run.layout)
    return _compile(run, step, *step_shapes(run.config, run.layout))


def compile_eval_step(run: Run) -> Any:
    """The evaluation step, compiled. Raises Stopped as `compile_train_step` does."""
    train, layout = run.config.train, run.layout
    size = train.eval_batch_size or train.batch_size
    batch = batch_shapes(size, 1, train.seq_len, layout.sharding(layout.batch_spec()))
    state = sharded_shapes(run.config, layout)
    step = make_eval_step(run.config, layout)
    return _compile(run, step, state.params, batch, state.buffers)


def _compile(run: Run, jitted: Any, *shapes: Any) -> Any:
    run.phase(None)  # a compiler may take its time
    return run.wait(in_background(lambda: jitted.lower(*shapes).compile()))


def is_due(step: int, every: int) -> bool:
    """Whether something done every `every` updates (0: never) is due after `step` of them."""
    return every > 0 and step > 0 and step % every == 0


def next_stop(done: int, steps: int, *periods: int) -> int:
    """The next update, at most `steps`, after which anything of these periods is due."""
    return min([steps, *(done + every - done % every for every in periods if every > 0)])
