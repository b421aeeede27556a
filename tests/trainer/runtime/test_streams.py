"""What the command does when nobody reads what it prints, in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
import time

import pytest

from meshwright.trainer.config.load import override, to_yaml

RUN = [sys.executable, "-c", "from meshwright.trainer.cli import run; run()"]

OWN_TERMINAL = (
    "import fcntl, signal, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # the tests may run under nohup
)


@contextlib.contextmanager
def ending(process: subprocess.Popen):
    """Leaves nothing behind that runs on when a test has failed."""
    try:
        yield
    finally:
        process.kill()
        process.wait()


def shell(script: str, *words: str) -> tuple[int, str]:
    """Exit code and stderr of a shell script that starts the command as `"$@"`."""
    command = ["bash", "-c", f"set -o pipefail; {script}", "bash", *RUN, *words]
    done = subprocess.run(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    return done.returncode, done.stderr


FULL = "meshwright: standard output: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    ("script", "words", "expected"),
    [
        ('"$@" | head -1', ["config", "--schema"], (0, "")),
        ('"$@" | sleep 0', ["--help"], (0, "")),
        ('"$@" >&-', ["config", "tiny"], (0, "")),
        ('"$@" 0<&- >&- 2>&-', ["config", "tiny"], (0, "")),
        ('"$@" > /dev/full', ["config", "tiny"], (1, FULL)),
        ('"$@" > /dev/full', ["--help"], (1, FULL)),
        ('"$@" 2> /dev/full', ["config", "tiny", "x=1"], (2, "")),
        ('"$@" 0<&- >&- 2>&-', ["config", "tiny", "x=1"], (2, "")),
        ('"$@" > /dev/full 2>&-', ["trian"], (2, "")),
    ],
)
def test_what_is_not_read_changes_no_exit_code_but_a_full_disk_does(script, words, expected):
    assert shell(script, *words) == expected


def test_the_name_of_a_file_does_not_make_two_lines_of_one():
    code, errors = shell('"$@"', "config", "no\nsuch\x1b[2Jfile")
    assert code == 2
    assert errors.startswith(r"meshwright: no\nsuch\x1b[2Jfile: no such preset or file; ")
    assert errors.count("\n") == 1


def test_a_prompt_that_is_not_utf8_is_one_line():
    code, errors = shell("""exec "$@" $'b\\xff'""", *["generate", "x", "--prompt", "a", "--prompt"])
    assert (code, errors) == (2, "meshwright: b\\udcff: is not UTF-8; write it in UTF-8\n")


@pytest.fixture
def config(small_config, corpus, tmp_path):
    """A file, and the folder of its run on one device."""
    small = override(
        small_config,
        *(f"run.dir={tmp_path}", "run.name=run", "device.cpu_devices=1", "device.platform=cpu"),
        *("mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1", "model.layers=1", "log.every=1"),
        *("data.source=text", f"data.paths=[{corpus}/*.txt]", "data.holdout=0.2"),
        *(f"data.store={tmp_path}/store", "log.sample=a"),
    )
    path = tmp_path / "small.yaml"
    path.write_text(to_yaml(small))
    return path, tmp_path / "run"


def steps(folder) -> list[int]:
    """Of all lines of metrics.jsonl, each of which is an object."""
    return [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_it(config):
    """Its reader leaves; all is closed at the start; the disk of its output is full. The second and
    third time it has nothing to do but to draw and to say that it is done.
    """
    path, folder = config
    words = "train", str(path)
    environ = 'export MPLBACKEND=foo FORCE_COLOR=1 CUDA_VISIBLE_DEVICES=""; '
    assert shell(environ + '"$@" | head -1', *words) == (0, "")
    expected = steps(folder)
    picture = folder / "loss.png"
    for redirected in ("0<&- >&- 2>&-", "> /dev/full"):
        picture.unlink()
        again = f'"$@" checkpoint.resume=auto {redirected}'
        assert shell(environ + again, *words) == (0, "")
        assert picture.exists()
        assert steps(folder) == expected


def test_a_terminal_that_goes_away_stops_a_run_which_saves(config):
    """It gets SIGHUP, and cannot write to its progress bar any more."""
    path, folder = config
    terminal, its_side = pty.openpty()
    process = subprocess.Popen(
        [
            *RUN[:2],
            f"{OWN_TERMINAL}; {RUN[2]}",
            "train",
            str(path),
            "train.steps=100000",
            "train.eval_every=0",
        ],
        stdin=its_side,
        stdout=its_side,
        stderr=its_side,
        start_new_session=True,
    )
    with ending(process):
        os.close(its_side)
        os.set_blocking(terminal, False)
        written, end = b"", time.monotonic() + 120
        while b"tokens/s" not in written and time.monotonic() < end:
            with contextlib.suppress(BlockingIOError):
                written += os.read(terminal, 2**16)
            time.sleep(0.05)
        assert b"tokens/s" in written
        os.close(terminal)
        assert process.wait(timeout=120) == 75
    last = steps(folder)[-1]
    assert (folder / "checkpoints" / str(last)).is_dir()
