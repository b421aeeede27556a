"""A finished run, opened to evaluate it or to generate from it: on the mesh of its config, or on
another. A checkpoint holds all that this needs, its tokenizer too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ..models.transformer import Transformer
from ..sharding.keys import check_local
from ..sharding.layout import Layout
from .checkpoint import restore
from .config import Config
from .data.tokenizer import Tokenizer, read_tokenizer
from .device import prepare_devices
from .manifest import config_of, newest_tokenizer_text
from .placement import in_stage_order, model_order_shapes
from .processes import check_same_config, on_first
from .state import eval_part, lay_out, sharded_shapes


@dataclass(frozen=True)
class OpenRun:
    """config: the run's with the overrides. tokenizer: the run's. params: their average where the
    run keeps one (optimizer.ema). router_bias: State's.
    """

    config: Config
    layout: Layout
    tokenizer: Tokenizer
    params: Transformer
    router_bias: jax.Array | None


def open_run(
    run: str | Path, overrides: Sequence[str] = (), command: Mapping[str, Any] | None = None
) -> OpenRun:
    """Open a run's newest checkpoint, or the one that `run` is, on the mesh of its config, or of
    the overrides; with checkpoint.fallback the newest that is not damaged. command: what else
    several processes must have in common.

    Raises ValueError for another model, and where `run` holds no checkpoint.
    """
    check_local(run)
    path = Path(run)
    stored = config_of(path)
    # micro-batches are training's, or a pipeline's: what is evaluated without one is one piece
    one_piece = ["train.microbatches=1"] if stored.mesh.pipe == 1 else []
    config = config_of(path, *one_piece, *overrides)
    if config.model != stored.model:
        raise ValueError(f"model: {path} holds the parameters of its own; leave model.… out")
    prepare_devices(config.device)
    check_same_config(config, command)
    layout = lay_out(config)
    fallback = config.checkpoint.fallback
    text = on_first(lambda: newest_tokenizer_text(path, fallback=fallback))
    target = eval_part(model_order_shapes(config, layout))
    _, restored = restore(path, target, fallback=fallback)
    router_bias = restored.pop("router_bias", None)
    (params,) = jax.tree.leaves(restored, is_leaf=lambda node: isinstance(node, Transformer))
    params = in_stage_order(params, sharded_shapes(config, layout).params, config)
    return OpenRun(config, layout, read_tokenizer(text, str(path)), params, router_bias)
