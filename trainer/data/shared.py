"""One token store for several processes."""

from __future__ import annotations

import jax

from ..config import Config
from ..runtime.processes import any_process, on_first
from .store import Store, build_store, open_data
from .tokenizer import Tokenizer


def open_shared_data(config: Config, tokenizer: Tokenizer | None) -> Store:
    """`open_data`; the store is built by the first process if it is not there, and a host that does
    not see it builds its own. Raises ValueError where processes read different documents.
    """
    if jax.process_count() > 1:
        on_first(lambda: build_store(config, tokenizer) and None)
    store = open_data(config, tokenizer)
    check_shared(store)
    return store


def check_shared(store: Store) -> None:
    """Raises ValueError where the store of another process holds other documents or ids."""
    said = [store.description.made_from, store.description.tokenizer_digest]
    if any_process(said != on_first(lambda: said)):
        raise ValueError(f"data: {store.path} was made from other documents on another host")
