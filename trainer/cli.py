"""The `meshwright` command. A config is checked before JAX is imported: mistakes answer at once.

Exit codes: 0 done; 2 the config or the input is wrong; 75 stopped by SIGTERM, SIGHUP or Ctrl-C
after a committed checkpoint; 1 anything else: `verify` found a mismatch, the run cannot go on, the
disk or stdout refuses (one line on stderr), or a bug (with its traceback).
"""

from __future__ import annotations

import io
import json
import re
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import click

from ..sharding.keys import check_local, user_path
from ..sharding.pipeline.schedules import NAMES, UNIFORM
from .config import Config, DeviceConfig, LaunchConfig
from .config.load import ConfigError, check_text, describe, load, presets, schema
from .runtime.streams import open_streams
from .sampling import Sampling

STOPPED = 75
"""The exit code of a run that was stopped and has saved: EX_TEMPFAIL, start it again."""


def run() -> NoReturn:
    """The console script: one command, then the end of the process.

    What `train` prints is beside its work, so no stream may end it. Of the other commands it is the
    work itself: where stdout refuses, but for a reader that went away, the exit code is 1.
    """
    stdout = open_streams()
    try:
        code = main()
    except Exception:  # a bug
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    if stdout.error is not None and sys.argv[1:2] != ["train"]:
        code = _fail(f"standard output: {stdout.error}", 1)
    if "jax" in sys.modules:
        from .runtime.processes import end_processes

        end_processes(code)
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without × prints ?, and goes on
            stream.reconfigure(errors="replace")
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        for word in words:
            check_text(word)
        with meshwright.make_context("meshwright", words) as context:
            return meshwright.invoke(context)
    except click.exceptions.Exit as end:  # --help and --version
        return end.exit_code
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except ValueError as error:
        if not _is_ours(error):
            raise
        return _fail(error, 2)
    except RuntimeError as error:
        if not _is_ours(error):
            raise
        return _fail(error, 1)
    except OSError as error:  # the disk's fault, not ours: its message names the path
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 1)


def _fail(reason: object, code: int) -> int:
    # one line, though the name of a file may hold several, or move a terminal's cursor
    line = re.sub(r"[\x00-\x1f\x7f]", lambda found: repr(found[0])[1:-1], str(reason))
    print(f"meshwright: {line}", file=sys.stderr)
    return code


@click.group(
    no_args_is_help=False,
    context_settings={"max_content_width": 100},
    epilog=f"CONFIG is a preset ({', '.join(presets())}) or a YAML file; key=value overrides it: "
    f"meshwright train tiny mesh.tensor=4 mesh.fsdp=1 train.steps=50",
)
@click.version_option(version("meshwright"), message="%(prog)s %(version)s")
def meshwright() -> None:
    """Train language models with JAX on any device mesh, with the same numbers in every layout."""


CONFIG = click.argument("config", metavar="CONFIG")
RUN = click.argument("run", metavar="RUN")
OVERRIDES = click.argument("overrides", metavar="[key=value]...", nargs=-1)


@meshwright.command("train")
@CONFIG
@OVERRIDES
def train_command(config: str, overrides: tuple[str, ...]) -> int:
    """Train a model.

    Its run folder is run.dir/run.name.
    """
    loaded = _start(load(config, *overrides))
    from .loop import train
    from .runtime.stop import Stopped

    try:
        train(loaded)
    except Stopped as stopped:
        return _fail(stopped, STOPPED)
    return 0


@meshwright.command("eval")
@RUN
@OVERRIDES
def eval_command(run: str, overrides: tuple[str, ...]) -> int:
    """Loss of a finished run on its whole held-out set.

    RUN is a run folder, or one checkpoint in it.
    """
    _start(_config_of_run(run, overrides))
    from .evaluate import evaluate_run
    from .runtime.processes import is_first

    line = evaluate_run(run, overrides)
    if is_first():
        print(line)
    return 0


@meshwright.command("generate")
@RUN
@OVERRIDES
@click.option(
    "--prompt", "prompts", metavar="TEXT", multiple=True, required=True, help="May be repeated."
)
@click.option(
    "--tokens",
    default=Sampling.tokens,
    show_default=True,
    help="Tokens to add at most; end-of-text ends a text earlier.",
)
@click.option(
    "--temperature",
    default=Sampling.temperature,
    show_default=True,
    help="Divides the logits; 0: always the likeliest token.",
)
@click.option("--top-k", type=int, help="Sample from the K likeliest tokens only.")
@click.option("--top-p", type=float, help="And from as few of them as reach this probability.")
@click.option(
    "--seed", default=Sampling.seed, show_default=True, help="Another seed samples other texts."
)
def generate_command(
    run: str, overrides: tuple[str, ...], prompts: tuple[str, ...], **sampling: Any
) -> int:
    """Continue texts with a run's newest checkpoint.

    RUN is a run folder, or one checkpoint in it.
    """
    Sampling(**sampling)
    _start(_config_of_run(run, overrides))
    from .generate import generate_run
    from .runtime.processes import is_first

    texts = generate_run(run, prompts, overrides, **sampling)
    lines = zip(prompts, texts, strict=True) if is_first() else ()
    for number, (prompt, text) in enumerate(lines, 1):
        if len(texts) > 1:
            print(f"--- {number} of {len(texts)}")
        print(prompt + text)
    return 0


@meshwright.command("checkpoint")
@click.argument("action", type=click.Choice(["ls", "show", "verify"]))
@click.argument("path")
def checkpoint_command(action: str, path: str) -> int:
    """List, show or verify the checkpoints of a run.

    ls lists a run's checkpoints, show prints one's config and leaves, verify reads every leaf and
    compares its digest. PATH is a run folder, or one checkpoint in it. Needs no accelerator.
    """
    check_local(path)
    if action == "verify":
        _start(Config(device=DeviceConfig(platform="cpu"), launch=LaunchConfig(process_count=1)))
        from .checkpoint.restore import verify_checkpoints

        whole = True
        for line, good in verify_checkpoints(Path(path)):
            print(line)
            whole &= good
        return 0 if whole else 1
    from .checkpoint.manifest import list_checkpoints, show_checkpoint

    for line in (list_checkpoints if action == "ls" else show_checkpoint)(Path(path)):
        print(line)
    return 0


@meshwright.command("verify")
@CONFIG
@OVERRIDES
@click.option(
    "--layouts", metavar="FILE", help="One layout a line, as key=value overrides of one device."
)
def verify_command(config: str, overrides: tuple[str, ...], layouts: str | None) -> int:
    """Compare loss and gradients of every layout with one device."""
    loaded = _start(load(config, *overrides))
    from .inspect.verify import verify

    return 0 if verify(loaded, layouts) else 1


@meshwright.command("plan")
@CONFIG
@OVERRIDES
@click.option(
    "--target",
    default="devices",
    metavar="NAME",
    show_default=True,
    help="devices: those here, or that the config simulates; cpu: as many simulated ones as the "
    "config is meant for; else a TPU topology such as v5e:4x4, of which none is needed.",
)
@click.option("as_json", "--json", is_flag=True, help="The same as one JSON object.")
@click.option(
    "--memory", is_flag=True, help="Instead, what each policy of recomputation saves and costs."
)
def plan_command(
    config: str, overrides: tuple[str, ...], target: str, as_json: bool, memory: bool
) -> int:
    """Compile the step: where every byte lies, what moves, whether it fits."""
    from .inspect.topology import prepare_target

    if as_json and memory:
        raise click.UsageError("--memory is a table for people; leave --json out")
    loaded, devices = prepare_target(load(config, *overrides), target)
    from .inspect.memory import memory_table
    from .inspect.plan import DoesNotFitError, describe_plan, make_plan

    if memory:
        print(memory_table(loaded, devices))
        return 0
    try:
        plan = make_plan(loaded, devices)
    except DoesNotFitError as error:
        if as_json:
            print(json.dumps({"memory": {"fits": False}, "reason": str(error)}, indent=2))
        raise
    print(json.dumps(asdict(plan), indent=2) if as_json else "\n".join(describe_plan(plan)))
    return 1 if plan.memory.fits is False else 0


@meshwright.command("schedule")
@click.argument("name")
@click.option("--stages", type=int, help="Devices along the pipe; a CSV file knows its own.")
@click.option("--microbatches", type=int, help="Micro-batches of a step; a CSV file knows its own.")
@click.option("--chunks", type=int, help="Pieces each stage's layers are cut into: interleaved.")
@click.option(
    "--uniform",
    is_flag=True,
    help=f"The lockstep form of {', '.join(UNIFORM)}: ticks that are alike on all stages.",
)
@click.option(
    "--costs",
    default="1,1,1",
    metavar="F,B,W[,TRANSFER]",
    show_default=True,
    help="Time of forward, input gradient and weight gradient of one stage and micro-batch, and of "
    "a transfer between stages (0), in any unit.",
)
@click.option("as_json", "--json", is_flag=True, help="The figures as one JSON object.")
@click.option("--png", metavar="FILE", help="Also draw the Gantt chart.")
def schedule_command(
    name: str,
    stages: int | None,
    microbatches: int | None,
    chunks: int | None,
    uniform: bool,
    costs: str,
    as_json: bool,
    png: str | None,
) -> int:
    """Simulate a pipeline schedule: its table, bubble, memory and Gantt chart."""
    from ..sharding.pipeline.load import load_schedule
    from ..sharding.pipeline.simulate import read_costs, simulate
    from .inspect.schedule import describe_schedule, draw_schedule, schedule_json

    if png:
        check_local(png, "--png ")
    given = read_costs(costs)
    schedule = load_schedule(name, stages, microbatches, chunks, uniform=uniform)
    simulation = simulate(schedule, given)
    if png:
        draw_schedule(schedule, simulation, given, Path(png))
    if as_json:
        print(json.dumps(schedule_json(schedule, simulation, given)))
    else:
        print("\n".join(describe_schedule(schedule, simulation, given)))
    return 0


schedule_command.help = (
    f"{schedule_command.help}\n\nNAME is one of {', '.join(NAMES)}, or a CSV file with a table of "
    f"your own. Starts no device."
)


@meshwright.command("config")
@click.argument("config", metavar="[CONFIG]", required=False)
@OVERRIDES
@click.option("as_schema", "--schema", is_flag=True, help="Print the JSON schema instead.")
def config_command(config: str | None, overrides: tuple[str, ...], as_schema: bool) -> int:
    """Print the resolved config with each field's meaning."""
    if as_schema and config:
        raise ConfigError("--schema reads no CONFIG: it is the same of all; leave one of them out")
    if as_schema:
        print(json.dumps(schema(), indent=2))
    elif config:
        print(describe(load(config, *overrides)), end="")
    else:
        raise ConfigError("config needs a preset or a YAML file, or --schema")
    return 0


@meshwright.command("tokenize")
@CONFIG
@OVERRIDES
def tokenize_command(config: str, overrides: tuple[str, ...]) -> int:
    """Write the token store that training reads."""
    loaded = load(config, *overrides)
    from .checkpoint.manifest import newest_tokenizer_text
    from .data.store import build_store, describe_store, open_store
    from .data.tokenizer import read_tokenizer

    tokenizer = None
    if (source := loaded.checkpoint.init_from) is not None:
        tokenizer = read_tokenizer(newest_tokenizer_text(user_path(source)), source)
    print(describe_store(open_store(build_store(loaded, tokenizer))))
    return 0


def _config_of_run(run: str, overrides: Sequence[str]) -> Config:
    from .checkpoint.manifest import config_of

    check_local(run)
    return config_of(Path(run), *overrides)


def _start(config: Config) -> Config:
    """Start JAX on the devices of a config that is known to be good."""
    from .runtime.devices import prepare_devices

    prepare_devices(config)
    return config


def _is_ours(error: Exception) -> bool:
    """Whether this package raised it, for the user to read; out of a library it is a bug."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals["__name__"].startswith(__name__.partition(".")[0] + ".")
