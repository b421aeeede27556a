"""A finished run, opened to evaluate it or to generate from it: on the mesh of its config, or on
another.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from ..models.transformer import Transformer
from ..sharding.keys import check_local
from ..sharding.layout import Layout
from .checkpoint import restore
from .config import Config
from .data.store import Store, open_data
from .device import prepare_devices
from .load import load
from .manifest import run_of
from .placement import in_stage_order, model_order_shapes
from .state import eval_part, lay_out, sharded_shapes


@dataclass(frozen=True)
class OpenRun:
    """config: the run's with the overrides. store: of its documents, and of its tokenizer. params:
    their average where the run keeps one (optimizer.ema). router_bias: State's.
    """

    config: Config
    layout: Layout
    store: Store
    params: Transformer
    router_bias: jax.Array | None


def open_run(run: str | Path, overrides: Sequence[str] = ()) -> OpenRun:
    """Open a run's newest checkpoint, or the one that `run` is, on the mesh of its config, or of
    the overrides.

    Raises ValueError for another model, and where the documents are not those of the run: another
    held-out set, or another tokenizer. An override of `data` says that this is meant.
    """
    check_local(run)
    path = Path(run)
    run = run_of(path)
    stored = load(run / "config.yaml")
    # micro-batches are training's, or a pipeline's: what is evaluated without one is one piece
    one_piece = ["train.microbatches=1"] if stored.mesh.pipe == 1 else []
    config = load(run / "config.yaml", *one_piece, *overrides)
    if config.model != stored.model:
        raise ValueError(f"model: {run} holds the parameters of its own; leave model.… out")
    prepare_devices(config.device)
    layout = lay_out(config)
    store = open_data(config)
    of_run = json.loads((run / "data.json").read_text(encoding="utf-8"))
    meant = any(word.startswith("data.") for word in overrides)
    if store.description.made_from != of_run and not meant:
        raise ValueError(
            f"{store.path} was made from other documents or settings than {run}, see its "
            f"data.json; to read them all the same write data.source={config.data.source}"
        )
    _, restored = restore(path, eval_part(model_order_shapes(config, layout)))
    router_bias = restored.pop("router_bias", None)
    (params,) = jax.tree.leaves(restored, is_leaf=lambda node: isinstance(node, Transformer))
    params = in_stage_order(params, sharded_shapes(config, layout).params, config)
    return OpenRun(config, layout, store, params, router_bias)
