"""One run on several processes: the same rows, losses and checkpoints as on one (C06, C23), and one
end for all."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.trainer.checkpoint.manifest import find_checkpoints
from meshwright.trainer.config import Config
from meshwright.trainer.config.load import override, to_yaml
from meshwright.trainer.loop import train
from processes import free_port, own_lines

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(run, tmp_path_factory) -> Config:
    folder = tmp_path_factory.mktemp("runs")
    return override(
        run.config,
        *(f"run.dir={folder}", "run.name=moved", f"device.compile_cache={folder / 'xla'}"),
        *("optimizer.schedule=constant", "train.eval_every=0", "checkpoint.every=0"),
        *(
            "mesh.data=1",
            "mesh.fsdp=2",
            "mesh.tensor=4",
            "log.sample='alpha '",
            "launch.timeout=60",
        ),
    )


@pytest.fixture(scope="module")
def unbroken(base):
    return train(override(base, "run.name=unbroken", "train.steps=12"))


@contextlib.contextmanager
def started(config: Config, count: int, devices: int, last: tuple[str, ...] = ()):
    """`meshwright train` in `count` processes of `devices` devices each. last: overrides that only
    the last of them gets."""
    file = Path(config.run.dir) / f"{config.run.name}.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    port, processes = free_port(), []
    with contextlib.ExitStack() as stack:
        for number in range(count):
            settings = (
                *(f"launch.coordinator=localhost:{port}", f"launch.process_id={number}"),
                *(f"launch.process_count={count}", f"device.cpu_devices={devices}"),
                f"device.count={count * devices}",
            )
            own = last if number == count - 1 else ()
            command = [sys.executable, "-m", "meshwright", "train", str(file), *settings, *own]
            process = subprocess.Popen(
                command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def ends(processes) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each."""
    printed = [process.communicate(timeout=240) for process in processes]
    return [(one.returncode, *text) for one, text in zip(processes, printed, strict=True)]


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_rows_and_losses_are_those_of_one_process(base, unbroken):
    """Case C06. 2 processes × 4 devices for 7 steps, 1 × 8 to 10, 4 × 2 (tensor over two
    processes) to 12.
    """
    folder = Path(base.run.dir, "moved")
    with started(override(base, "train.steps=7"), 2, 4) as processes:
        (code, out, errors), (other_code, other_out, other_errors) = ends(processes)
    assert (code, other_code) == (0, 0), errors + other_errors
    # C23: evaluation, sample, picture, checkpoint: what one process writes all have computed
    assert "done: checkpoint, metrics.jsonl and loss.png are in" in out
    assert "sample      alpha " in out
    assert own_lines(other_out) == []
    assert list(find_checkpoints(folder)) == [7]

    train(override(base, "train.steps=10", "checkpoint.resume=must"))
    assert list(find_checkpoints(folder)) == [7, 10]

    with started(override(base, "train.steps=12", "checkpoint.resume=must"), 4, 2) as processes:
        for code, _, errors in ends(processes):
            assert code == 0, errors
    ours = [line for line in lines(folder) if "loss" in line]
    theirs = [line for line in unbroken.history if "loss" in line]
    for line, expected in zip(ours, theirs, strict=True):
        for key in ("step", "position", "tokens", "lr"):
            assert line[key] == expected[key]
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    last, expected = lines(folder)[-1], unbroken.history[-1]
    assert last["eval_targets"] == expected["eval_targets"]
    assert last["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)


def test_a_signal_to_one_process_stops_all_at_one_step(base):
    config = override(base, "run.name=stopped", "train.steps=100000")
    folder = Path(base.run.dir, "stopped")
    with started(config, 2, 4) as processes:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            time.sleep(0.5)
            if (folder / "metrics.jsonl").exists() and len(lines(folder)) > 3:
                break
        processes[1].send_signal(signal.SIGTERM)
        (code, _, errors), (other_code, _, other_errors) = ends(processes)
    assert (code, other_code) == (75, 75), errors + other_errors
    (step,) = find_checkpoints(folder)
    assert lines(folder)[-1]["step"] == step
    for text in (errors, other_errors):
        assert f"meshwright: stopped: step {step} is saved in {folder}" in text


DIFFERENT = {
    "optimizer.lr": "0.2",
    "run.seed": "1",
    "precision.compute": "bf16",
    "train.steps": "8",
    "train.batch_size": "32",
    "checkpoint.every": "2",
    "layout.zero": "1",
    "log.sample": "beta",
    "checkpoint.init_from": f"/a/{'long' * 30}/other",  # differs where no message shows it all
}


def test_processes_that_were_started_differently_are_told_how(base):
    """All keys, with both values and who has them, before anything is compiled or written. Where a
    process keeps its own files is its own matter."""
    source = f"checkpoint.init_from=/a/{'long' * 30}/one"
    config = override(base, "run.name=differing", "launch.timeout=20", source)
    cache = f"device.compile_cache={Path(base.run.dir, 'own')}"
    changed = tuple(f"{key}={value}" for key, value in DIFFERENT.items())
    with started(config, 2, 4, (*changed, cache)) as processes:
        for code, out, errors in ends(processes):
            assert code == 2, errors
            (line,) = [line for line in errors.splitlines() if line.startswith("meshwright: ")]
            assert re.search(r"init_from=…\S*long/one\S* in process 0, …\S*long/other\S* in", line)
            for key, value in list(DIFFERENT.items())[:-1]:
                assert re.search(rf"{key}=\S+.* in process 0, {value} in process 1", line), key
            assert line.count(" in process 1") == len(DIFFERENT)
            assert "compiling" not in out
    assert not Path(base.run.dir, "differing").exists()


def test_processes_with_unequal_devices_are_refused(base):
    config = override(base, "run.name=unequal", "device.count=null")
    last = "device.cpu_devices=2", "device.count=null", "mesh.data=-1", "mesh.tensor=1"
    with started(config, 2, 4, last) as processes:
        for code, _, errors in ends(processes):
            assert code == 2, errors
            (line,) = [line for line in errors.splitlines() if line.startswith("meshwright: ")]
            assert "there are 4 in process 0, 2 in process 1" in line


def test_a_mistake_is_refused_by_all_with_one_line(base, unbroken):
    with started(override(base, "run.name=unbroken"), 2, 4) as processes:
        for code, _, errors in ends(processes):
            assert code == 2, errors
            assert f"meshwright: {unbroken.folder} exists already; write run.name=…" in errors
    with started(override(base, "run.name=counted", "launch.timeout=20"), 2, 2) as processes:
        for code, _, errors in ends(processes):
            assert code == 2
            assert "mesh.fsdp=2 · mesh.tensor=4 needs 8 devices, but there are 4" in errors
