"""Rows to global arrays. The batch at a data position is a pure function of (seed, position).

The data position counts rows of the epoch stream: at position p stands row permute(p mod n) of
epoch p // n. So a run resumes from a number, on any number of processes and devices. A batch has B
sequences of S tokens in G microbatches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np

from ...models.batch import Batch
from ...sharding.context import token_at
from ...sharding.layout import Layout
from .order import permute
from .rows import Rows, row_count, rows_at
from .store import Split


def train_rows(split: Split, seq_len: int, seed: int) -> Callable[[np.ndarray], Rows]:
    """The epoch stream: a function from data positions [n] to their rows [n, S]."""
    count = row_count(split, seq_len)

    def rows(positions: np.ndarray) -> Rows:
        epoch, index = np.divmod(positions, count)
        return rows_at(split, permute(index, count, seed, epoch), seq_len)

    return rows


def placed(
    rows: Callable[[np.ndarray], Rows], seq_len: int, layout: Layout
) -> Callable[[np.ndarray], Rows]:
    """`rows`, each with its tokens in the order in which the layout's devices hold them; all that
    belongs to a token goes with it, its target too.
    """
    order = token_order(seq_len, layout)
    return lambda positions: Rows(*(a[:, order] for a in rows(positions)))


def token_order(seq_len: int, layout: Layout) -> np.ndarray:
    """[S]: which token of a row stands at each place of it on the layout's devices."""
    return token_at(np.arange(seq_len), seq_len, layout)


def batch_at(
    rows: Callable[[np.ndarray], Rows],
    position: int,
    batch_size: int,
    microbatches: int,
    seq_len: int,
    sharding: jax.NamedSharding,
) -> Batch:
    """The B rows from `position` on, [G, B/G, S] under `sharding`; row j is at divmod(j, B/G).

    Each process reads the rows its own devices hold, each once, though devices along a model axis
    hold copies.
    """
    assert batch_size % microbatches == 0
    shape = (microbatches, batch_size // microbatches, seq_len)
    row = np.arange(batch_size).reshape(shape[:2])
    held: list[Any] = list(sharding.addressable_devices_indices_map(shape).values())
    local = np.unique(np.concatenate([row[index[:2]].ravel() for index in held]))

    def place(values: np.ndarray) -> jax.Array:
        def shard(index: Any) -> np.ndarray:
            return values[np.searchsorted(local, row[index[:2]])][..., index[2]]

        return jax.make_array_from_callback(shape, sharding, shard)

    return Batch(*(place(values) for values in rows(position + local)))


def batch_shapes(
    batch_size: int, microbatches: int, seq_len: int, sharding: jax.NamedSharding
) -> Batch:
    """What `batch_at` gives, as ShapeDtypeStructs: to compile for."""
    shape = (microbatches, batch_size // microbatches, seq_len)
    integers: Any = jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)
    weights: Any = jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)
    return Batch(integers, integers, weights, integers, integers)


def eval_batches(split: Split, batch_size: int, seq_len: int, layout: Layout) -> Iterator[Batch]:
    """Every row of the split in order, [1, B, S]; padding rows fill the last batch."""
    rows = placed(partial(rows_at, split, seq_len=seq_len), seq_len, layout)
    sharding = layout.sharding(layout.batch_spec())
    for position in range(0, row_count(split, seq_len, partial=True), batch_size):
        yield batch_at(rows, position, batch_size, 1, seq_len, sharding)


def prefetch(
    batch: Callable[[int], Batch], position: int, stride: int, depth: int
) -> Generator[Future[Batch], None, None]:
    """Endless batches from `position` on, `depth` prepared ahead of the one in use; 0: none.

    It owns no position: state counts what was consumed, so a batch that was only prepared never
    counts. An error of `batch` is raised where its batch is waited for. Closing the iterator ends
    its thread after the batch it is at.
    """
    ahead: deque[Future[Batch]] = deque()
    pool = ThreadPoolExecutor(1, "prefetch")
    try:
        while True:
            while len(ahead) <= depth:
                ahead.append(pool.submit(batch, position))
                position += stride
            yield ahead.popleft()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
