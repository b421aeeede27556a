"""Loss over the whole held-out set: one number for any batch size and any mesh."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ..models.batch import Batch
from ..models.transformer import Transformer
from ..sharding.keys import user_path
from ..sharding.layout import Layout
from .config import Config
from .data.loader import eval_batches
from .data.shared import check_shared, open_shared_data
from .data.store import (
    Split,
    Store,
    check_fits,
    check_tokenizer,
    documents_of,
    open_data,
    open_store,
)
from .manifest import config_of, run_of
from .reading import OpenRun, open_run
from .resume import read_trained_on
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
    router_bias: jax.Array | None = None,
) -> Evaluation:
    """Every target of the batches counts once; see `heldout_batches`.

    eval_step: from `make_eval_step`, compiled or not. Batch sums are added in f64 on the host.
    """
    sums = [eval_step(params, batch, router_bias) for batch in batches]
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


def open_heldout(run: Path, opened: OpenRun) -> Store:
    """The documents to evaluate a run on: those that its overrides mean, or else those that it was
    trained on and held out: the store that it read, if that is still there, or one made again from
    what its config says. Raises ValueError that says where it looked.
    """
    if _documents(opened.config) != _documents(config_of(run)):
        return open_shared_data(opened.config, opened.tokenizer)
    cure = (
        "write data.store=… of its token store, data.paths=… of its documents, or what else to "
        "evaluate on (data.source=store data.store=… data.paths=[])"
    )
    try:
        trained_on = read_trained_on(run_of(run))
    except ValueError as error:
        raise ValueError(f"{error}; {cure}") from None
    looked = []
    for folder in dict.fromkeys((trained_on.store, opened.config.data.store)):
        if folder is None:
            continue
        try:
            store = open_store(user_path(folder))
            check_tokenizer(store.path, opened.tokenizer)
            check_fits(store, opened.config)
            if documents_of(store.description.made_from) == trained_on.documents:
                return store
            looked.append(f"{folder} holds other documents")
        except (ValueError, OSError) as error:
            looked.append(str(error) if Path(folder).exists() else f"{folder} is gone")
    try:
        store = open_data(opened.config, opened.tokenizer)
        if documents_of(store.description.made_from) == trained_on.documents:
            return store
        looked.append(f"the documents of its config, now in {store.path}, are others")
    except ValueError as error:
        looked.append(str(error))
    raise ValueError(
        f"{run}: what it was trained on is not found from {Path.cwd()}: "
        f"{', and '.join(dict.fromkeys(looked))}; {cure}"
    )


def _documents(config: Config) -> dict[str, Any]:
    """The keys that say which documents are meant, not where their tokens lie."""
    return {key: value for key, value in vars(config.data).items() if key not in WHERE}


WHERE = ("store", "prefetch")


def evaluate_run(run: str | Path, overrides: Sequence[str] = ()) -> str:
    """Evaluate a run's newest checkpoint on the mesh of its config, or of the overrides; see
    `open_run` and `open_heldout`.
    """
    opened = open_run(run, overrides)
    config, layout = opened.config, opened.layout
    store = open_heldout(Path(run), opened)
    check_shared(store)
    if store.heldout is None:
        raise ValueError(
            f"{store.path} holds no documents out (data.holdout=0); write data.source=…, "
            f"data.paths=… and data.holdout=… of documents to evaluate on"
        )
    batches = heldout_batches(store.heldout, config, layout)
    step = make_eval_step(config, layout)
    result = evaluate(step, opened.params, batches, opened.router_bias)
    return describe_evaluation(result, counting_levels(store))
