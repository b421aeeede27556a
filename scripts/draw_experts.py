"""Draw the load of experts over the updates of a run, also of one that goes on or was stopped: the
picture that a finished run leaves as experts.png.

    .venv/bin/python scripts/draw_experts.py runs/moe [experts.png]
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import matplotlib

from meshwright import load
from meshwright.trainer.metrics import lines_until, plot_expert_load


def main() -> int:
    matplotlib.use("Agg")
    run = Path(sys.argv[1])
    path = Path(sys.argv[2]) if len(sys.argv) > 2 else run / "experts.png"
    history, _ = lines_until(run / "metrics.jsonl", math.inf)
    plot_expert_load(history, load(run / "config.yaml").model.dense_layers, path)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
