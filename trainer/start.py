"""Where a run begins: its devices, folder, data and files, and the state that it goes on from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from ..models.position import position_number
from ..sharding.keys import user_path
from ..sharding.layout import Layout
from .checkpoint.manifest import newest_tokenizer_text
from .checkpoint.restore import restore_part, set_aside
from .checkpoint.run_folder import (
    as_one_process,
    check_data,
    compare_models,
    hold,
    named,
    resumes_from,
    run_folder,
    write_run_files,
)
from .checkpoint.save import Checkpoints, open_checkpoints
from .config import Config
from .config.load import load
from .data.shared import open_shared_data
from .data.store import Store, documents_of
from .data.tokenizer import Tokenizer, read_tokenizer
from .log.console import Reporter, report_steps
from .log.metrics import MetricsFile, open_metrics
from .log.summary import summarize
from .optim.learning_rate import rate_change
from .runtime.devices import prepare_devices
from .runtime.processes import any_process, check_same_config, is_first, make_agree, on_first, watch
from .runtime.stop import Agreement, stop_on_signals
from .state import State, abstract_state, init_state, lay_out, with_params


@dataclass(frozen=True)
class Run:
    """What the loop works with."""

    config: Config
    layout: Layout
    folder: Path
    store: Store
    metrics: MetricsFile
    checkpoints: Checkpoints
    reporter: Reporter
    agreement: Agreement
    """of all processes, to stop"""
    wait: Callable[[Future[Any]], Any]
    """gives a future's result, or raises Stopped"""
    phase: Callable[[str | None], None]
    """tells the watchdog what comes next"""


@contextmanager
def prepare_run(config: Config) -> Iterator[tuple[Run, State]]:
    """The run's folder, files and devices, ready to go on from the state that comes with them."""
    prepare_devices(config)
    check_same_config(config)
    if not config.checkpoint.required and jax.process_count() > 1:
        raise ValueError(
            "checkpoint.required=false is for one process: several would not agree whether a "
            "save has failed"
        )
    name = on_first(lambda: named(config).run.name)
    config = replace(config, run=replace(config.run, name=name))
    layout, folder = lay_out(config), run_folder(config)
    kept = as_one_process(config, jax.process_count())
    # before the data, which may take long
    expected, _ = on_first(lambda: resumes_from(folder, kept))
    store = open_shared_data(config, tokenizer_of(folder if expected else None, config))
    with (
        stop_on_signals(config.checkpoint.grace) as stop,
        watch(config.launch.timeout) as phase,
        report_steps(config.train.steps, config.log.every, quiet=not is_first()) as reporter,
        ExitStack() as lock,
    ):
        on_first(lambda: lock.enter_context(hold(folder, config)))
        resumes, changes = on_first(lambda: resumes_from(folder, kept))
        if resumes != expected:
            raise ValueError(f"{folder} has begun meanwhile, by another process; start again")
        for line in summarize(config, layout, abstract_state(config)):
            reporter.say(line)
        reporter.say(f"run         {folder}")
        for change in changes:
            reporter.say(f"changed     {change}")
        if resumes:
            on_first(lambda: check_data(folder, documents_of(store.description.made_from)))
        state = begin_state(config, layout, folder, resumes, reporter)
        if resumes:
            say_rate_change(folder, kept, int(state.step), reporter)
        on_first(lambda: write_run_files(folder, kept, store))
        if any_process(not (folder / "config.yaml").is_file()):
            raise ValueError(
                f"run.dir={config.run.dir}: not all processes see {folder}; "
                "write a folder that all hosts share"
            )

        # of several processes none may leave alone: they agree first
        alone, agree = jax.process_count() == 1, make_agree(layout.mesh)
        with (
            open_metrics(
                folder / "metrics.jsonl",
                int(state.step),
                position_number(state.position),
                writes=is_first(),
                required=config.checkpoint.required,
                say=reporter.say,
            ) as metrics,
            open_checkpoints(
                folder, kept, layout, store.tokenizer.text, held_out_losses(metrics), reporter.say
            ) as checkpoints,
        ):
            run = Run(
                config=config,
                layout=layout,
                folder=folder,
                store=store,
                metrics=metrics,
                checkpoints=checkpoints,
                reporter=reporter,
                agreement=Agreement(lambda: agree(stop.asked()), late=0 if alone else 1),
                wait=stop.result if alone else Future.result,
                phase=phase,
            )
            yield run, state


def tokenizer_of(resumed: Path | None, config: Config) -> Tokenizer | None:
    """The tokenizer that belongs to the parameters which the run begins with: of its own newest
    checkpoint where it resumes, or of checkpoint.init_from. None: the parameters are random.
    """
    source, fallback = resumed, config.checkpoint.fallback
    if source is None and config.checkpoint.init_from is not None:
        source, fallback = user_path(config.checkpoint.init_from), False
    if source is None:
        return None
    text = on_first(lambda: newest_tokenizer_text(source, fallback=fallback))
    return read_tokenizer(text, str(source))


def say_rate_change(folder: Path, kept: Config, done: int, reporter: Reporter) -> None:
    """Say what becomes of the learning rate of a run that resumes after `done` updates, while the
    folder's config.yaml is still that of the last start.
    """
    before = (folder / "config.yaml").absolute()
    if line := on_first(lambda: rate_change(load(before), kept, done)):
        reporter.say(f"{'rate':<12}{line}")


def begin_state(
    config: Config, layout: Layout, folder: Path, resumes: bool, reporter: Reporter
) -> State:
    """The state the run begins with: its newest checkpoint's, or a first one, with the parameters
    of checkpoint.init_from if that is given.
    """
    steps = config.train.steps
    if resumes:
        fallback = config.checkpoint.fallback
        step, state = restore_part(folder, config, layout, lambda state: state, fallback=fallback)
        if step > steps:
            raise ValueError(f"train.steps={steps}: {folder} has made {step} updates already")
        for damaged in on_first(lambda: set_aside(folder, step)):
            reporter.say(f"{'damaged':<12}{damaged}")
        finished = ", that is all of them" if step == steps else ""
        reporter.say(f"{'resumed':<12}after {step} of {steps} updates{finished}")
        reporter.begin(step)
        return state
    state = init_state(config, layout)
    if config.checkpoint.init_from is None:
        return state
    source = user_path(config.checkpoint.init_from)
    for difference in on_first(lambda: compare_models(source, config)):
        reporter.say(f"{'changed':<12}{difference}")
    step, part = restore_part(source, config, layout, lambda state: {"params": state.params})
    reporter.say(f"{'parameters':<12}of step {step} of {source}")
    return with_params(state, part["params"])


def held_out_losses(metrics: MetricsFile) -> dict[int, float]:
    """Step -> held-out loss of the evaluations so far, as the first process knows them."""
    history = metrics.history
    lines = on_first(lambda: [line for line in history if line.get("eval_loss") is not None])
    return {line["step"]: line["eval_loss"] for line in lines}
