"""What a person waits for: `meshwright --help`; the moment `meshwright train tiny` starts to
compile, on a machine without a token store and later; and what the persistent compilation cache
saves the second time. Each is a process of its own, with a cache folder made for this.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import Figure, Seconds, parse_rounds, ratios, report

HELP, COMPILING = 1.0, 8.0
"""Wall seconds."""

CACHED = 0.8
"""CPU-seconds of a run of one step with its programs in the cache, over those of one that compiles;
about 1 where the cache does not work.
"""


def meshwright(*arguments: str, folder: Path, until: str | None = None) -> Seconds:
    """What the command costs to its end, or until it prints a line with `until` and is killed."""
    cpu, wall = children_cpu(), time.perf_counter()
    process = subprocess.Popen(
        [Path(sys.executable).with_name("meshwright"), *arguments],
        cwd=folder,
        env=os.environ | {"XDG_CACHE_HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if until is not None and until in line:
            process.kill()
            break
    wall = time.perf_counter() - wall
    process.communicate()
    done = any(until in line for line in said) if until else process.returncode == 0
    if not done:
        raise SystemExit(f"meshwright {' '.join(arguments)} failed:\n{''.join(said)}")
    return Seconds(children_cpu() - cpu, wall)


def children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    rounds = parse_rounds(__doc__, default=5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def compiling(run: str) -> Seconds:
            train = ("train", "tiny", f"run.name={run}")
            return meshwright(*train, folder=folder, until="compiling")

        def one_step(run: str) -> Seconds:
            return meshwright("train", "tiny", f"run.name={run}", "train.steps=1", folder=folder)

        shown = [meshwright("--help", folder=folder) for _ in range(rounds)]
        first = compiling("first")
        later = [compiling(f"later-{number}") for number in range(rounds)]
        one_step("warm-up")  # fills every other cache, that of matplotlib's fonts
        starts = []
        for number in range(rounds):
            shutil.rmtree(folder / "meshwright" / "xla")
            starts.append((one_step(f"compiled-{number}"), one_step(f"cached-{number}"))[::-1])
    figures = [
        wait("--help", shown, HELP),
        wait("train tiny to `compiling`, the first time", [first], COMPILING),
        wait("train tiny to `compiling`, later", later, COMPILING),
        *ratios("train tiny for one step, programs cached / compiled", starts, cpu=CACHED),
    ]
    return report("Starting", figures)


def wait(name: str, costs: list[Seconds], bound: float) -> Figure:
    cpu, wall = (statistics.median(column) for column in zip(*costs, strict=True))
    return Figure(f"{name}, wall seconds", wall, bound, detail=f"{cpu:.3g} CPU-seconds")


if __name__ == "__main__":
    sys.exit(main())
