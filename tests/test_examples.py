"""Every example runs, in a process of its own, and says what it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str) -> str:
    environment = os.environ | {"PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ring_attention_is_attention_and_sends_seven_times_its_keys():
    difference, sent = run("ring_attention.py").splitlines()
    assert float(difference.split()[-1]) < 1e-5
    assert int(re.sub(r"\D", "", sent.split("bytes")[0])) == 7 * 2 * (2048 // 8) * 4 * 32 * 4


def test_every_example_is_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"ring_attention.py"}
