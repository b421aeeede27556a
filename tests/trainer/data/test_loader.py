import threading
from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.sharding.rules import Dim
from meshwright.trainer.data.loader import (
    batch_at,
    batch_shapes,
    eval_batches,
    placed,
    prefetch,
    token_order,
    train_rows,
)
from meshwright.trainer.data.order import permute
from meshwright.trainer.data.rows import row_count, rows_at
from runs import layout_on

SEQ_LEN = 8
MESHES = [
    ((8, 1, 1), P(None, ("data", "fsdp"))),
    ((1, 1, 8), P(None, ("data", "fsdp"))),
    ((2, 2, 2), P(None, ("data", "fsdp"))),
    ((2, 2, 2), P(None, ("fsdp", "data"))),
    ((2, 1, 4), P(None, "data", "tensor")),
    ((2, 2, 2), P()),
]


def sharding(sizes=(2, 2, 2), spec=MESHES[0][1]):
    mesh = jax.make_mesh(sizes, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    return NamedSharding(mesh, spec)


@pytest.fixture(scope="module")
def split(make_split):
    return make_split([3, 40, 1, 17, 60, 9, 5, 88, 2, 31])


def stream_rows(split, position, count, seed):
    """Rows of the epoch stream, one at a time."""
    n = row_count(split, SEQ_LEN)
    rows = [
        permute(np.array([p % n]), n, seed, p // n)[0] for p in range(position, position + count)
    ]
    return rows_at(split, np.array(rows), SEQ_LEN)


@pytest.mark.parametrize(("sizes", "spec"), MESHES)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_batch_is_the_same_on_every_mesh(split, sizes, spec, microbatches):
    rows = train_rows(split, SEQ_LEN, seed=3)
    place = sharding(sizes, spec)
    position = row_count(split, SEQ_LEN) - 5  # the batch spans two epochs
    batch = batch_at(rows, position, 16, microbatches, SEQ_LEN, place)
    for name, expected in stream_rows(split, position, 16, seed=3)._asdict().items():
        array = getattr(batch, name)
        assert array.dtype == expected.dtype
        assert array.sharding.is_equivalent_to(place, 3)
        expected = expected.reshape(microbatches, 16 // microbatches, SEQ_LEN)
        np.testing.assert_array_equal(np.asarray(array), expected)
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])


@pytest.mark.parametrize(("mode", "context", "tensor"), [("zigzag", 4, 2), ("usp", 4, 1)])
def test_all_that_belongs_to_a_token_is_dealt_out_with_it(split, mode, context, tensor):
    """Its target too, which in the row's order was the next token. Without zigzag rows stay."""
    layouts = [
        layout_on([Dim("seq", SEQ_LEN, "train.seq_len")], mode, context=context, tensor=tensor)
        for mode in (mode, "ring")
    ]
    rows, positions = train_rows(split, SEQ_LEN, seed=3), np.arange(20)
    dealt, same = (placed(rows, SEQ_LEN, layout)(positions) for layout in layouts)
    order = token_order(SEQ_LEN, layouts[0])
    assert sorted(order) == list(range(SEQ_LEN)) != list(order)
    for name, expected in rows(positions)._asdict().items():
        np.testing.assert_array_equal(getattr(dealt, name), expected[:, order])
        np.testing.assert_array_equal(getattr(same, name), expected)


def test_rows_are_read_once(split):
    """Eight devices hold every row twice or eight times; it is read once, with all its fields."""
    rows, asked = train_rows(split, SEQ_LEN, seed=0), []

    def counted(positions):
        asked.append(positions.tolist())
        return rows(positions)

    for sizes, spec in MESHES:
        batch_at(counted, 100, 16, 2, SEQ_LEN, sharding(sizes, spec))
    assert asked == [list(range(100, 116))] * len(MESHES)


def test_an_epoch_holds_every_row_once_and_the_next_another_order(split):
    n = row_count(split, SEQ_LEN)
    rows = train_rows(split, SEQ_LEN, seed=0)
    epochs = [rows(np.arange(n) + n * epoch).tokens.tolist() for epoch in range(2)]
    in_order = rows_at(split, np.arange(n), SEQ_LEN).tokens.tolist()
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(in_order)
    assert epochs[0] != epochs[1]
    assert train_rows(split, SEQ_LEN, seed=1)(np.arange(n)).tokens.tolist() != epochs[0]


@pytest.mark.parametrize("depth", [0, 1, 2, 8])
@pytest.mark.parametrize("stop", [0, 1, 3])
def test_resume_depends_on_the_consumed_position_alone(split, depth, stop):
    """Stopped after any batch, whatever was prepared ahead, a new iterator goes on exactly."""
    place = sharding()
    batch = partial(
        batch_at,
        train_rows(split, SEQ_LEN, seed=0),
        batch_size=16,
        microbatches=2,
        seq_len=SEQ_LEN,
        sharding=place,
    )
    position, seen = 48, []
    for count in (stop, 5 - stop):
        batches = prefetch(batch, position, 16, depth)
        for _ in range(count):
            seen.append((position, np.asarray(next(batches).result().tokens)))
            position += 16
        batches.close()
    assert [position for position, _ in seen] == [48, 64, 80, 96, 112]
    for position, tokens in seen:
        np.testing.assert_array_equal(tokens, np.asarray(batch(position).tokens))


@pytest.mark.parametrize("depth", [0, 1, 2, 8])
def test_prefetch_prepares_so_many_ahead(depth):
    made = []
    prepared = threading.Semaphore(0)

    def batch(position):
        made.append(position)
        prepared.release()
        return -position

    batches = prefetch(batch, 0, 3, depth)
    assert made == []
    for step in range(4):
        assert next(batches).result() == -3 * step
        for _ in range(depth + 1 if step == 0 else 1):
            assert prepared.acquire(timeout=10)
        assert made == [3 * i for i in range(step + 1 + depth)]
    batches.close()


@pytest.mark.parametrize("depth", [0, 2])
def test_prefetch_raises_where_the_batch_is_waited_for(depth):
    def batch(position):
        if position == 2:
            raise OSError("disk gone")
        return position

    batches = prefetch(batch, 0, 1, depth)
    assert [next(batches).result(), next(batches).result()] == [0, 1]
    with pytest.raises(OSError, match="disk gone"):
        next(batches).result()
    batches.close()
    assert_thread_ends()


def test_closing_prefetch_ends_its_thread():
    batches = prefetch(lambda position: position, 0, 1, 4)
    next(batches)
    assert [thread for thread in threading.enumerate() if "prefetch" in thread.name]
    batches.close()
    assert_thread_ends()


def test_closing_prefetch_does_not_wait_for_data_that_does_not_come():
    came = threading.Event()
    batches = prefetch(lambda position: came.wait(30), 0, 1, 2)
    future = next(batches)
    batches.close()
    assert not future.done()
    came.set()
    assert_thread_ends()


def assert_thread_ends():
    for thread in threading.enumerate():
        if "prefetch" in thread.name:
            thread.join(timeout=10)
            assert not thread.is_alive()


@pytest.mark.parametrize("batch_size", [8, 16, 24, 64])
def test_evaluation_sees_every_target_once_whatever_the_batch_size(split, batch_size):
    layout = layout_on(data=2, fsdp=2, tensor=2)
    batches = list(eval_batches(split, batch_size, SEQ_LEN, layout))
    assert {batch.tokens.shape for batch in batches} == {(1, batch_size, SEQ_LEN)}
    rows = {
        name: np.concatenate([np.asarray(getattr(batch, name))[0] for batch in batches])
        for name in ("tokens", "targets", "weights", "segments")
    }
    count = row_count(split, SEQ_LEN, partial=True)
    assert len(rows["tokens"]) == -(-count // batch_size) * batch_size
    targets = rows["targets"][rows["weights"] == 1]
    np.testing.assert_array_equal(targets, np.delete(split.tokens, split.offsets[:-1]))
    assert (rows["segments"][count:] == -1).all()
    assert (rows["weights"][count:] == 0).all()


@pytest.mark.parametrize(("microbatches", "batch_size"), [(1, 8), (2, 16)])
def test_shapes_are_those_of_a_batch(split, microbatches, batch_size):
    rows = train_rows(split, SEQ_LEN, 0)
    batch = batch_at(rows, 0, batch_size, microbatches, SEQ_LEN, sharding())
    shapes = batch_shapes(batch_size, microbatches, SEQ_LEN, sharding())
    assert jax.tree.structure(shapes) == jax.tree.structure(batch)
    for shape, leaf in zip(jax.tree.leaves(shapes), jax.tree.leaves(batch), strict=True):
        assert (shape.shape, shape.dtype, shape.sharding) == (leaf.shape, leaf.dtype, leaf.sharding)


def test_batch_is_a_pytree(split):
    batch = batch_at(train_rows(split, SEQ_LEN, 0), 0, 8, 1, SEQ_LEN, sharding())
    doubled = jax.tree.map(lambda x: x * 2, batch)
    assert len(jax.tree.leaves(batch)) == 5
    np.testing.assert_array_equal(np.asarray(doubled.tokens), 2 * np.asarray(batch.tokens))
