"""The `meshwright` command. A config is checked before JAX is imported: mistakes answer at once.

Exit codes: 0 done; 2 the config or the input is wrong; 75 stopped by SIGTERM, SIGHUP or Ctrl-C
after a committed checkpoint; 1 anything else: `verify` found a mismatch, the run cannot go on, the
disk or stdout refuses (one line on stderr), or a bug (with its traceback).
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

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
    except SystemExit as end:  # argparse has said all
        code = int(end.code or 0)
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
        for word in sys.argv[1:] if arguments is None else arguments:
            check_text(word)
        options = _parse(arguments)
        return options.command(options)
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


def _train(options: argparse.Namespace) -> int:
    config = _start(load(options.config, *options.overrides))
    from .loop import train
    from .runtime.stop import Stopped

    try:
        train(config)
    except Stopped as stopped:
        return _fail(stopped, STOPPED)
    return 0


def _eval(options: argparse.Namespace) -> int:
    _start(_config_of_run(options))
    from .evaluate import evaluate_run
    from .runtime.processes import is_first

    line = evaluate_run(options.run, options.overrides)
    if is_first():
        print(line)
    return 0


def _generate(options: argparse.Namespace) -> int:
    names = [field.name for field in fields(Sampling)]
    settings = {name: getattr(options, name) for name in names}
    Sampling(**settings)
    _start(_config_of_run(options))
    from .generate import generate_run
    from .runtime.processes import is_first

    texts = generate_run(options.run, options.prompt, options.overrides, **settings)
    lines = zip(options.prompt, texts, strict=True) if is_first() else ()
    for number, (prompt, text) in enumerate(lines, 1):
        if len(texts) > 1:
            print(f"--- {number} of {len(texts)}")
        print(prompt + text)
    return 0


def _verify(options: argparse.Namespace) -> int:
    config = _start(load(options.config, *options.overrides))
    from .inspect.verify import verify

    return 0 if verify(config, options.layouts) else 1


def _plan(options: argparse.Namespace) -> int:
    from .inspect.topology import prepare_target

    config = load(options.config, *options.overrides)
    config, devices = prepare_target(config, options.target)
    from .inspect.memory import memory_table
    from .inspect.plan import DoesNotFitError, describe_plan, make_plan

    if options.memory:
        print(memory_table(config, devices))
        return 0
    try:
        plan = make_plan(config, devices)
    except DoesNotFitError as error:
        if options.json:
            print(json.dumps({"memory": {"fits": False}, "reason": str(error)}, indent=2))
        raise
    print(json.dumps(asdict(plan), indent=2) if options.json else "\n".join(describe_plan(plan)))
    return 1 if plan.memory.fits is False else 0


def _schedule(options: argparse.Namespace) -> int:
    from ..sharding.pipeline.load import load_schedule
    from ..sharding.pipeline.simulate import read_costs, simulate
    from .inspect.schedule import describe_schedule, draw_schedule, schedule_json

    if options.png:
        check_local(options.png, "--png ")
    costs = read_costs(options.costs)
    sizes = options.stages, options.microbatches, options.chunks
    schedule = load_schedule(options.name, *sizes, uniform=options.uniform)
    simulation = simulate(schedule, costs)
    if options.png:
        draw_schedule(schedule, simulation, costs, Path(options.png))
    if options.json:
        print(json.dumps(schedule_json(schedule, simulation, costs)))
    else:
        print("\n".join(describe_schedule(schedule, simulation, costs)))
    return 0


def _config(options: argparse.Namespace) -> int:
    if options.schema and (options.config or options.overrides):
        raise ConfigError("--schema reads no CONFIG: it is the same of all; leave one of them out")
    if options.schema:
        print(json.dumps(schema(), indent=2))
    elif options.config:
        print(describe(load(options.config, *options.overrides)), end="")
    else:
        raise ConfigError("config needs a preset or a YAML file, or --schema")
    return 0


def _tokenize(options: argparse.Namespace) -> int:
    config = load(options.config, *options.overrides)
    from .checkpoint.manifest import newest_tokenizer_text
    from .data.store import build_store, describe_store, open_store
    from .data.tokenizer import read_tokenizer

    tokenizer = None
    if (source := config.checkpoint.init_from) is not None:
        tokenizer = read_tokenizer(newest_tokenizer_text(user_path(source)), source)
    print(describe_store(open_store(build_store(config, tokenizer))))
    return 0


def _checkpoint(options: argparse.Namespace) -> int:
    check_local(options.path)
    path = Path(options.path)
    if options.action == "verify":
        _start(Config(device=DeviceConfig(platform="cpu"), launch=LaunchConfig(process_count=1)))
        from .checkpoint.restore import verify_checkpoints

        whole = True
        for line, good in verify_checkpoints(path):
            print(line)
            whole &= good
        return 0 if whole else 1
    from .checkpoint.manifest import list_checkpoints, show_checkpoint

    for line in {"ls": list_checkpoints, "show": show_checkpoint}[options.action](path):
        print(line)
    return 0


def _config_of_run(options: argparse.Namespace) -> Config:
    from .checkpoint.manifest import config_of

    check_local(options.run)
    return config_of(Path(options.run), *options.overrides)


def _start(config: Config) -> Config:
    """Start JAX on the devices of a config that is known to be good."""
    from .runtime.devices import prepare_devices

    prepare_devices(config)
    return config


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="meshwright",
        description="Train language models with JAX on any device mesh, with the same numbers in "
        "every layout.",
        epilog=f"CONFIG is a preset ({', '.join(presets())}) or a YAML file; key=value overrides "
        "it: meshwright train tiny mesh.tensor=4 mesh.fsdp=1 train.steps=50",
    )
    parser.add_argument(
        "--version", action="version", version=f"meshwright {version('meshwright')}"
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(
        run: Callable[[argparse.Namespace], int],
        summary: str,
        operand: str = "config",
        nargs: str | None = None,
    ) -> argparse.ArgumentParser:
        name = run.__name__.removeprefix("_")
        added = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        meaning = {
            "config": "a preset or a YAML file",
            "run": "a run folder, or one checkpoint in it",
        }[operand]
        added.add_argument(operand, metavar=operand.upper(), nargs=nargs, help=meaning)
        example = "what to change, as in mesh.tensor=4 train.steps=50"
        added.add_argument("overrides", metavar="key=value", nargs="*", help=example)
        added.set_defaults(command=run)
        return added

    command(_train, "train a model; its run folder is run.dir/run.name")
    command(_eval, "loss of a finished run on its whole held-out set", "run")
    generate = command(_generate, "continue texts with a run's newest checkpoint", "run")
    generate.add_argument(
        "--prompt",
        metavar="TEXT",
        action="append",
        required=True,
        help="may be given several times",
    )
    for name, kind, meaning in (
        ("tokens", int, "tokens to add at most; end-of-text ends a text earlier"),
        ("temperature", float, "divides the logits; 0: always the likeliest token"),
        ("top-k", int, "sample from the K likeliest tokens only"),
        ("top-p", float, "and from as few of them as reach this probability"),
        ("seed", int, "another seed samples other texts"),
    ):
        default = getattr(Sampling, name.replace("-", "_"))
        meaning += "" if default is None else f" (default: {default})"
        generate.add_argument(f"--{name}", type=kind, default=default, help=meaning)
    checkpoint = commands.add_parser(
        "checkpoint",
        help="list, show or verify the checkpoints of a run",
        description="list a run's checkpoints, show one's config and leaves, or read every leaf "
        "and compare its digest; needs no accelerator",
        allow_abbrev=False,
    )
    checkpoint.add_argument("action", choices=("ls", "show", "verify"))
    checkpoint.add_argument("path", metavar="PATH", help="a run folder, or one checkpoint in it")
    checkpoint.set_defaults(command=_checkpoint, overrides=None)
    verify = command(_verify, "compare loss and gradients of every layout with one device")
    verify.add_argument(
        "--layouts", metavar="FILE", help="one layout a line, as key=value overrides of one device"
    )
    plan = command(_plan, "compile the step: where every byte lies, what moves, whether it fits")
    plan.add_argument(
        "--target",
        default="devices",
        metavar="NAME",
        help="devices: those here, or that the config simulates; cpu: as many simulated ones as "
        "the config is meant for; else a TPU topology such as v5e:4x4, of which none is needed",
    )
    tables = plan.add_mutually_exclusive_group()
    tables.add_argument("--json", action="store_true", help="the same as one JSON object")
    tables.add_argument(
        "--memory",
        action="store_true",
        help="instead, what each policy of recomputation saves and costs",
    )
    schedule = commands.add_parser(
        "schedule",
        help="simulate a pipeline schedule: its table, bubble, memory and Gantt chart",
        description="check and simulate a pipeline schedule: its table, bubble, memory and Gantt "
        "chart; starts no device",
        allow_abbrev=False,
    )
    schedule.add_argument(
        "name", metavar="NAME", help=f"{', '.join(NAMES)}, or a CSV file with a table of your own"
    )
    for name, meaning in (
        ("stages", "devices along the pipe; a CSV file knows its own, and the next two"),
        ("microbatches", "micro-batches of a step"),
        ("chunks", "pieces each stage's layers are cut into, for interleaved"),
    ):
        schedule.add_argument(f"--{name}", type=int, metavar="N", help=meaning)
    schedule.add_argument(
        "--uniform",
        action="store_true",
        help=f"the lockstep form of {', '.join(UNIFORM)}: ticks that are alike on all stages",
    )
    schedule.add_argument(
        "--costs",
        default="1,1,1",
        metavar="F,B,W[,TRANSFER]",
        help="time of forward, input gradient and weight gradient of one stage and micro-batch, "
        "and of a transfer between stages, in any unit (default: 1,1,1,0)",
    )
    schedule.add_argument("--json", action="store_true", help="the figures as one JSON object")
    schedule.add_argument("--png", metavar="FILE", help="also draw the Gantt chart")
    schedule.set_defaults(command=_schedule, overrides=None)
    config = command(_config, "print the resolved config with each field's meaning", nargs="?")
    config.add_argument("--schema", action="store_true", help="print the JSON schema instead")
    command(_tokenize, "write the token store that training reads")

    options, rest = parser.parse_known_args(arguments)
    # argparse takes positionals in one run; overrides may also follow an option
    if unknown := [word for word in rest if word.startswith("-")]:
        parser.error(f"no such option: {' '.join(unknown)}")
    if rest and options.overrides is None:
        parser.error(f"no such argument: {' '.join(rest)}")
    options.overrides = (options.overrides or []) + rest
    return options


def _is_ours(error: Exception) -> bool:
    """Whether this package raised it, for the user to read; out of a library it is a bug."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals["__name__"].startswith(__name__.partition(".")[0] + ".")
