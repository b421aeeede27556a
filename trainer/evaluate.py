"""Loss over the whole held-out set: one number for any batch size and any mesh."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ..models.batch import Batch
from ..models.transformer import Transformer
from ..sharding.layout import Layout
from .checkpoint.finished_run import open_documents, open_run
from .config import Config
from .data.loader import eval_batches
from .data.store import Split, Store
from .step import make_eval_step


@dataclass(frozen=True)
class Evaluation:
    """loss: mean nll in nats over all `targets` of the held-out set."""

    loss: float
    targets: int


def evaluate(
    eval_step,
    params: Transformer,
    batches: Iterable[Batch],
    buffers: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Every target of the batches counts once; see `heldout_batches`.

    eval_step: from `make_eval_step`, compiled or not. Batch sums are added in f64 on the host.
    """
    sums = [eval_step(params, batch, buffers) for batch in batches]
    losses, targets = zip(*jax.device_get(sums), strict=True)
    count = int(sum(map(float, targets)))
    return Evaluation(sum(map(float, losses)) / count, count)


def heldout_batches(heldout: Split, config: Config, layout: Layout) -> Iterator[Batch]:
    """The whole held-out set; the last batch is filled with rows of weight zero."""
    size = config.train.eval_batch_size or config.train.batch_size
    return eval_batches(heldout, size, config.train.seq_len, layout)


def counting_levels(store: Store) -> dict[str, float]:
    """Entropies in nats per token of the training split: what counting alone would reach."""
    levels = {
        "unigram counts": store.description.unigram_entropy,
        "bigram counts": store.description.bigram_entropy,
    }
    return {name: level for name, level in levels.items() if level is not None}


def describe_evaluation(result: Evaluation, levels: dict[str, float]) -> str:
    beside = "; ".join(
        f"{name} of the training split {level:.4f}" for name, level in levels.items()
    )
    return f"held-out loss {result.loss:.4f} nats per token over {result.targets:,} targets" + (
        f" ({beside})" if beside else ""
    )


def evaluate_run(run: str | Path, overrides: Sequence[str] = ()) -> str:
    """Evaluate a run's newest checkpoint on the mesh of its config, or of the overrides; see
    `open_run` and `open_documents`.
    """
    opened = open_run(run, overrides)
    config, layout = opened.config, opened.layout
    store = open_documents(Path(run), opened)
    if store.heldout is None:
        raise ValueError(
            f"{store.path} holds no documents out (data.holdout=0); write data.source=…, "
            f"data.paths=… and data.holdout=… of documents to evaluate on"
        )
    batches = heldout_batches(store.heldout, config, layout)
    step = make_eval_step(config, layout)
    result = evaluate(step, opened.params, batches, opened.buffers)
    return describe_evaluation(result, counting_levels(store))
