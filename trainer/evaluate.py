"""Loss over the whole held-out set: one number for any batch size and any mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from ..models.transformer import Transformer
from ..sharding.layout import Layout, specs
from .checkpoint import restore
from .config import Config
from .data.entropy import bigram_entropy, unigram_entropy
from .data.loader import eval_batches
from .data.store import Split, Store, open_data
from .load import load
from .state import abstract_state, lay_out
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
        "unigram counts": unigram_entropy(store.train),
        "bigram counts": bigram_entropy(store.train),
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
    """Evaluate the newest checkpoint of a run folder on the mesh of its config, or of the
    overrides.
    """
    run = Path(run)
    config = load(run / "config.yaml", *overrides)
    layout = lay_out(config)
    params = abstract_state(config).params
    target = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=layout.sharding(spec)
        ),
        params,
        specs(params, layout.param_spec),
    )
    store = open_data(config)
    params = restore(run, {"params": target})["params"]
    result = evaluate(make_eval_step(config, layout), params, store.heldout, config, layout)
    return describe_evaluation(result, counting_levels(store))
