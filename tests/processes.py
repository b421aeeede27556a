"""A run of several processes on this machine, each a fresh interpreter."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass

START = """
import os, signal, sys, time
import jax, numpy as np
from meshwright.trainer.config import Config, DeviceConfig, LaunchConfig, TrainConfig
from meshwright.trainer.runtime.devices import prepare_devices
from meshwright.trainer.runtime.processes import (
    any_process, end_processes, is_first, make_agree, on_first, watch
)

launch = LaunchConfig(
    coordinator="127.0.0.1:" + sys.argv[1],
    process_id=int(sys.argv[2]),
    process_count=int(sys.argv[3]),
    timeout=float(sys.argv[5]),
)
device = DeviceConfig(cpu_devices=int(sys.argv[4]), compile_cache=None)
config = Config(device=device, launch=launch, train=TrainConfig(batch_size=120))
prepare_devices(config)
"""


@dataclass(frozen=True)
class Ended:
    """returncode is minus the signal where one ended the process; seconds: since all started."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def printed(self) -> list[str]:
        return own_lines(self.stdout)

    @property
    def said(self) -> list[str]:
        """The lines on stderr that are ours; the rest is JAX's log."""
        return [line for line in self.stderr.splitlines() if line.startswith("meshwright: ")]


def own_lines(stdout: str) -> list[str]:
    """The lines without those of Gloo, whose threads break into each other's."""
    return [line for line in stdout.splitlines() if line and not re.search(r"Gloo|peer rank", line)]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_processes(
    code: str, *, count: int = 2, devices: int = 2, timeout: float = 60, stopped: Sequence[int] = ()
) -> list[Ended]:
    """Run `code` in `count` joined processes of `devices` devices each; `stopped` ones never end by
    themselves and are killed when the others have ended.
    """
    numbers = [str(free_port()), "", str(count), str(devices), str(timeout)]
    script = START + textwrap.dedent(code)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_", "TPU_"))}
    started = time.monotonic()
    processes = []
    for number in range(count):
        numbers[1] = str(number)
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", script, *numbers],
                env=clean,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ended = {}
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.enter_context(process)
            stack.callback(process.kill)
        for number in sorted(range(count), key=lambda number: number in stopped):
            if number in stopped:
                processes[number].kill()
            stdout, stderr = processes[number].communicate(timeout=120)
            seconds = time.monotonic() - started
            ended[number] = Ended(processes[number].returncode, stdout, stderr, seconds)
    return [ended[number] for number in range(count)]
