"""Draw docs/schedules.png: the rate of update n of N = 100 by each schedule, as docs/optimizers.md
defines it.

    .venv/bin/python scripts/draw_schedules.py [docs/schedules.png]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from meshwright.trainer.config import OptimizerConfig, TrainConfig
from meshwright.trainer.log.pictures import empty_figure
from meshwright.trainer.optim.learning_rate import learning_rate

STEPS, WARMUP = 100, 10
SCHEDULES = {
    "constant": OptimizerConfig(lr=1.0, warmup=WARMUP, schedule="constant"),
    "inverse_sqrt": OptimizerConfig(lr=1.0, warmup=WARMUP, schedule="inverse_sqrt"),
    "cosine": OptimizerConfig(lr=1.0, warmup=WARMUP, schedule="cosine"),
    "linear": OptimizerConfig(lr=1.0, warmup=WARMUP, schedule="linear"),
    "wsd, cooldown c = 20": OptimizerConfig(lr=1.0, warmup=WARMUP, schedule="wsd", cooldown=20),
}


def main() -> None:
    figure = empty_figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.add_subplot()
    updates = np.arange(1, STEPS + 1)
    for name, config in SCHEDULES.items():
        rates = np.asarray(learning_rate(config, TrainConfig(steps=STEPS))(updates - 1))
        axes.plot(updates, np.broadcast_to(rates, STEPS), marker=".", markersize=3, label=name)
    axes.set_xlabel("update n of N")
    axes.set_ylabel("optimizer.lr times")
    axes.set_xticks([1, WARMUP, STEPS - 20, STEPS], ["1", "w = 10", "N - c = 80", "N = 100"])
    axes.set_yticks([0.1, 0.5, 1.0], ["final_ratio = 0.1", "0.5", "1"])
    axes.grid(alpha=0.3)
    axes.set_xlim(0, STEPS + 1)
    axes.set_ylim(0, 1.05)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/schedules.png")
    figure.savefig(target, dpi=110)
    print(target)


if __name__ == "__main__":
    main()
