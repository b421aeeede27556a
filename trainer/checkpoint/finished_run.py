"""A finished run, opened to evaluate it or to generate from it: on the mesh of its config, or on
another. A checkpoint holds all that generating needs, its tokenizer too; evaluating needs documents
as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...models.transformer import Transformer
from ...sharding.keys import check_local, user_path
from ...sharding.layout import Layout
from ..config import Config
from ..data.shared import check_shared, open_shared_data
from ..data.store import Store, check_fits, check_tokenizer, documents_of, open_data, open_store
from ..data.tokenizer import Tokenizer, read_tokenizer
from ..runtime.devices import prepare_devices
from ..runtime.processes import check_same_config, on_first
from ..state import eval_part, lay_out
from .manifest import config_of, newest_tokenizer_text, run_of
from .restore import restore_part
from .run_folder import read_trained_on


@dataclass(frozen=True)
class OpenRun:
    """A run's newest checkpoint, or one of its others, laid out on a mesh."""

    config: Config
    """the run's, with the overrides"""
    layout: Layout
    tokenizer: Tokenizer
    """the run's"""
    params: Transformer
    """their average where the run keeps one (optimizer.ema)"""
    buffers: dict[str, Any]
    """those of `State`"""


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
    prepare_devices(config)
    check_same_config(config, command)
    layout = lay_out(config)
    fallback = config.checkpoint.fallback
    text = on_first(lambda: newest_tokenizer_text(path, fallback=fallback))
    _, restored = restore_part(path, config, layout, eval_part, fallback=fallback)
    buffers = restored.pop("buffers")
    (params,) = restored.values()
    return OpenRun(config, layout, read_tokenizer(text, str(path)), params, buffers)


def open_documents(run: Path, opened: OpenRun) -> Store:
    """The documents to evaluate a run on, in ids of its tokenizer: those that overrides mean, or
    else those that it was trained on. Raises ValueError where they are not found, or differ between
    processes.
    """
    if _meant(opened.config) != _meant(config_of(run)):
        return open_shared_data(opened.config, opened.tokenizer)
    store = _documents_of_run(run, opened)
    check_shared(store)
    return store


def _meant(config: Config) -> dict[str, Any]:
    """The keys that say which documents are meant, not where their tokens lie."""
    where = "store", "prefetch"
    return {key: value for key, value in vars(config.data).items() if key not in where}


def _documents_of_run(run: Path, opened: OpenRun) -> Store:
    """The store that a run has read, if it is still there, or one made again from the documents of
    its config. Raises ValueError that says where it looked.
    """
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
