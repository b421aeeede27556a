"""Ask `plan` whether each preset that is meant for a pod fits the one that README.md names for it.
Needs the extra `tpu`, no TPU, and some minutes for each.

    .venv/bin/python scripts/check_presets.py
"""

from __future__ import annotations

import json
import subprocess
import sys

PODS = {"llama3-8b": "v5p:2x4x4", "mixtral-8x7b": "v5p:4x4x4", "qwen3-30b-a3b": "v5p:4x4x4"}


def main() -> int:
    fitting = True
    for preset, pod in PODS.items():
        command = [sys.executable, "-m", "meshwright", "plan", preset, "--target", pod, "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode not in (0, 1) or not done.stdout:
            return done.returncode or 1
        memory = json.loads(done.stdout)["memory"]
        fits = bool(memory["fits"]) and done.returncode == 0
        fitting &= fits
        needs = "more than a device has"
        if "arguments" in memory:  # it compiled
            total = memory["arguments"] + memory["temporaries"]
            needs = f"{total / 1e9:.1f} of {memory['limit'] / 1e9:.1f} GB a device"
        print(f"{preset} on {pod}: {'fits' if fits else 'DOES NOT FIT'}, {needs}", flush=True)
    return 0 if fitting else 1


if __name__ == "__main__":
    sys.exit(main())
