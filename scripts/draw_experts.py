"""Draw the load of experts over the updates of a run, also of one that goes on or was stopped: the
picture that a finished run leaves as experts.png.

    .venv/bin/python scripts/draw_experts.py runs/moe [experts.png]
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from meshwright import load
from meshwright.models.pattern import held
from meshwright.trainer.log.metrics import lines_until, plot_expert_load


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("picture", type=Path, nargs="?", help="default: experts.png in the folder")
    options = parser.parse_args()
    path = options.picture or options.run / "experts.png"
    try:
        numbers = held(load(options.run / "config.yaml").model).get("moe", [])
        history, _ = lines_until(options.run / "metrics.jsonl", math.inf)
        plot_expert_load(history, numbers, path)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
