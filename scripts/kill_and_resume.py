"""Kill a run of `tiny` at random moments, resume it, compare its numbers with an unbroken run's.

    python scripts/kill_and_resume.py [--kills 20] [--seed 0] [--steps 200]

SIGKILL and SIGTERM take turns. Two runs are killed: one resumes on its own mesh and must be bitwise
the unbroken one, one on two meshes in turn and must have its final loss within 1e-4.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

MESHES = (
    ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"),
    ("mesh.data=1", "mesh.fsdp=8", "mesh.tensor=1"),
)
CLOCK = ("step_time", "tokens_per_second", "mfu")
STOPPED = 75


def start(folder: Path, name: str, steps: int, mesh: tuple[str, ...]) -> subprocess.Popen[bytes]:
    settings = (
        *(f"run.dir={folder}", f"run.name={name}", f"train.steps={steps}", "log.sample=null"),
        *("checkpoint.every=5", "checkpoint.resume=auto", "train.eval_every=20"),
        # SGD does not amplify the rounding by which two meshes differ
        *("optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9"),
    )
    command = [sys.executable, "-m", "meshwright", "train", "tiny", *settings, *mesh]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run_unbroken(folder: Path, steps: int) -> tuple[float, float]:
    """Seconds until the first update is written, and from there to the end."""
    process, started = start(folder, "unbroken", steps, MESHES[0]), time.monotonic()
    metrics = folder / "unbroken" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    first = time.monotonic()
    finish(process)
    return first - started, time.monotonic() - first


def finish(process: subprocess.Popen[bytes]) -> str:
    """What it printed; the script ends where it failed."""
    printed, errors = process.communicate()
    if process.returncode != 0:
        sys.exit(f"exit code {process.returncode}: {errors.decode()}")
    return printed.decode()


def check_resumed(printed: str, newest: int | None) -> None:
    """The script ends where an attempt that got so far began elsewhere than at the newest."""
    if newest is not None and "compiling" in printed and f"after {newest} of" not in printed:
        sys.exit(f"did not resume from step {newest}:\n{printed}")


def history(folder: Path, name: str) -> list[dict]:
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in CLOCK} for line in lines]


def newest(folder: Path, name: str) -> int | None:
    found = (folder / name / "checkpoints").glob("*")
    return max((int(path.name) for path in found if path.name.isdecimal()), default=None)


def kill_and_resume(
    folder: Path, name: str, steps: int, kills: int, meshes, longest: float, chosen
) -> Counter:
    """Kill `kills` times, up to `longest` seconds after the start, then let it finish. Returns how
    often each signal ended with which exit code.
    """
    codes: Counter[str] = Counter()
    for attempt in range(kills):
        before = newest(folder, name)
        process = start(folder, name, steps, meshes[attempt % len(meshes)])
        try:
            process.wait(timeout=chosen.uniform(0.5, longest))
        except subprocess.TimeoutExpired:
            number = (signal.SIGKILL, signal.SIGTERM)[attempt // len(meshes) % 2]
            process.send_signal(number)
            check_resumed(process.communicate()[0].decode(), before)
            codes[f"{number.name} -> {process.returncode}"] += 1
            if number == signal.SIGTERM and process.returncode not in (STOPPED, -number, 0):
                sys.exit(f"SIGTERM: exit code {process.returncode}")
        else:
            codes[f"ended before the signal -> {process.returncode}"] += 1
        print(f"{name}: attempt {attempt + 1}, newest {newest(folder, name)}", flush=True)
    before = newest(folder, name)
    check_resumed(finish(start(folder, name, steps, meshes[0])), before)
    return codes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    chosen = random.Random(options.seed)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        to_first, to_end = run_unbroken(folder, options.steps)
        unbroken, half = history(folder, "unbroken"), options.kills // 2
        longest = to_first + 1.3 * to_end / half
        print(f"unbroken: {to_first:.1f} s to the first update, {to_end:.1f} s from there")
        same = kill_and_resume(folder, "same", options.steps, half, MESHES[:1], longest, chosen)
        rest = options.kills - half
        other = kill_and_resume(folder, "other", options.steps, rest, MESHES, longest, chosen)
        bitwise = history(folder, "same") == unbroken
        final = history(folder, "other")[-1]["eval_loss"]
        expected = unbroken[-1]["eval_loss"]
        difference = abs(final / expected - 1)
        print(f"same mesh: {dict(same)}; bitwise the unbroken run: {bitwise}")
        print(
            f"two meshes: {dict(other)}; final loss {final:.7f} beside {expected:.7f}, "
            f"relative difference {difference:.1e}"
        )
        print(f"{time.monotonic() - started:.0f} s")
    sys.exit(0 if bitwise and difference < 1e-4 else 1)


if __name__ == "__main__":
    main()
