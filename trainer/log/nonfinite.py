"""What is said of an attempt that was skipped because its loss or gradient norm was not finite, and
when a run ends for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from ..config import Config
from ..optim.precision import FLOOR
from ..state import abstract_state, named_leaves


def describe_attempt(values: dict[str, Any]) -> str:
    """values: its line of metrics.jsonl."""
    step, loss, norm = values["step"] + 1, values["loss"], values["grad_norm"]
    what = (
        f"step {step}: loss {loss:g}, gradient norm {norm:g}, at data position {values['position']}"
    )
    scale = values["loss_scale"]
    return what if scale is None else f"{what}, loss scale {scale:,.0f}"


def why_it_ends(
    config: Config, history: Sequence[dict[str, Any]], nonfinite: np.ndarray | None
) -> str | None:
    """Why no more may be skipped after the last attempt of `history`; None: the run goes on.

    nonfinite: bool [microbatch, parameter], with train.halt_on_nan.
    """
    if nonfinite is not None:
        return f"{name_nonfinite(config, nonfinite)}; train.halt_on_nan=true"
    if history[-1]["loss_scale"] == FLOOR:
        return f"no loss scale is lower; {how_to_calm(config)}"
    row, most = skipped_in_a_row(history), config.train.max_skipped
    if row > most:
        return f"{row} attempts in a row, train.max_skipped={most}; {how_to_calm(config)}"
    return None


def skipped_in_a_row(history: Sequence[dict[str, Any]]) -> int:
    """Attempts since the last that was an update."""
    attempts = [line for line in history if "position" in line]
    row = takewhile(lambda line: line["step"] == attempts[-1]["step"], reversed(attempts))
    # the first of them made that step, unless no attempt ever has
    return sum(1 for _ in row) - (attempts[-1]["step"] > 0)


def name_nonfinite(config: Config, nonfinite: np.ndarray) -> str:
    """Which micro-batches and parameters had gradients that were not finite."""
    if not nonfinite.any():
        return "each gradient is finite, their norm or the loss is not"
    names = list(named_leaves(abstract_state(config).params))
    pieces = [str(number + 1) for number in range(len(nonfinite)) if nonfinite[number].any()]
    flags = np.any(nonfinite, axis=0).tolist()
    named = [name for name, flag in zip(names, flags, strict=True) if flag]
    return (
        f"not finite in micro-batch {', '.join(pieces)} of {len(nonfinite)}: "
        f"the gradient of {', '.join(named)}"
    )


def how_to_calm(config: Config) -> str:
    return f"lower optimizer.lr={config.optimizer.lr} or lengthen optimizer.warmup"
