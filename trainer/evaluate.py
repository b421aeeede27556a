"""Loss over the whole held-out set: one number for any batch size and any mesh."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from ..models.transformer import Transformer
from ..sharding.layout import Layout
from .checkpoint import restore
from .config import Config
from .data.loader import eval_batches
from .data.store import Split, Store, open_data
from .load import load
from .state import lay_out, sharded_shapes
from .step import make_eval_step


@dataclass(frozen=True)
class Evaluation:
    """loss: mean nll in nats over all `targets` of the held-out set."""

    loss: float
    targets: int


def evaluate(
    eval_step, params: Transformer, heldout: Split, config: Config, layout: Layout
) -> Evaluation:
    """Every held-out target counts once; the last batch is filled with rows of weight zero.

    eval_step: from `make_eval_step`, compiled or not. Batch sums are added in f64 on the host.
    """
    size = config.train.eval_batch_size or config.train.batch_size
    sharding = layout.sharding(layout.batch_spec())
    sums = [
        eval_step(params, batch)
        for batch in eval_batches(heldout, size, config.train.seq_len, sharding)
    ]
    losses, targets = zip(*jax.device_get(sums), strict=True)
    count = int(sum(map(float, targets)))
    return Evaluation(sum(map(float, losses)) / count, count)


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
    """Evaluate a run's newest checkpoint on the mesh of its config, or of the overrides.

    Raises ValueError for another model, and where the documents are not those of the run: another
    held-out set, or another tokenizer. An override of `data` says that this is meant.
    """
    run = Path(run)
    # micro-batches are training's: an evaluation batch is one piece
    config = load(run / "config.yaml", "train.microbatches=1", *overrides)
    if config.model != load(run / "config.yaml").model:
        raise ValueError(f"model: {run} holds the parameters of its own; leave model.… out")
    layout = lay_out(config)
    store = open_data(config)
    of_run = json.loads((run / "data.json").read_text(encoding="utf-8"))
    meant = any(word.startswith("data.") for word in overrides)
    if store.description.made_from != of_run and not meant:
        raise ValueError(
            f"{store.path} was made from other documents or settings than {run}, see its "
            f"data.json; to evaluate on them all the same write data.source={config.data.source}"
        )
    params = restore(run, {"params": sharded_shapes(config, layout).params})["params"]
    result = evaluate(make_eval_step(config, layout), params, store.heldout, config, layout)
    return describe_evaluation(result, counting_levels(store))
