"""Masks: the same bits wherever they are computed, no two alike, and random enough."""

from functools import partial
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshwright.models.batch import Batch
from meshwright.models.dropout import EMBEDDING, FFN, MIXER, Dropout, drop, row_keys
from meshwright.models.position import advance, position_words
from meshwright.sharding.rules import ZERO_AXES, Dim
from meshwright.trainer.data.loader import token_order
from meshwright.trainer.step import data_positions
from runs import layout_on, shard_map

ROWS, TOKENS, CHANNELS, PIECES = 16, 24, 20, 2

LAYOUTS = {
    "data": {"data": 8},
    "fsdp, zero 1": {"data": 2, "fsdp": 4, "zero": 1},
    "tensor": {"tensor": 8},
    "all": {"data": 2, "fsdp": 2, "tensor": 2},
    "no sequence": {"fsdp": 2, "tensor": 4, "sequence_parallel": False},
    "context": {"context": 4, "fsdp": 2},
    "zigzag": {"context": 4, "tensor": 2, "mode": "zigzag"},
}


def masks(rate=0.3, position=100, layer=5, site=FFN, seed=3, pieces=PIECES, **layout):
    """What is kept of ones, scaled, in the layout's devices: [G, B, S, D] as [G·B, S, D]."""
    layout = layout_on([Dim("seq", TOKENS, "train.seq_len")], **layout)
    batch, stream = layout.batch_spec(), P(None, ZERO_AXES, layout.axes("seq"))

    def local(tokens, ones):
        first = jnp.asarray(position_words(position))
        positions = data_positions(first, Batch(*[tokens] * 5), layout)

        def one_microbatch(positions, x):
            return drop(x, Dropout(rate, row_keys(seed, positions)), layer, site, layout)

        return jax.lax.map(lambda piece: one_microbatch(*piece), (positions, ones))

    shape = (pieces, ROWS // pieces, TOKENS)
    tokens, ones = np.zeros(shape, np.int32), np.ones((*shape, CHANNELS), np.float32)
    kept = shard_map(local, layout, (batch, stream), stream)(tokens, ones)
    order = token_order(TOKENS, layout)
    return np.asarray(kept).reshape(ROWS, TOKENS, CHANNELS)[:, np.argsort(order)]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("pieces", [1, PIECES])
def test_the_same_bits_in_every_layout(name, pieces):
    """Case C28."""
    np.testing.assert_array_equal(masks(pieces=pieces, **LAYOUTS[name]), masks())


def test_no_two_shards_alike():
    """Case C28. Of rows and of tokens, wherever a mesh might cut."""
    kept = masks()
    pieces = kept.reshape(ROWS, 8, -1, CHANNELS).reshape(ROWS * 8, -1)
    assert len(np.unique(pieces, axis=0)) == len(pieces)


def test_a_row_has_its_mask_wherever_its_batch_begins():
    np.testing.assert_array_equal(masks(position=108)[:8], masks(position=100)[8:])


def test_values_are_zero_or_scaled():
    kept = masks(rate=0.3)
    assert set(np.unique(kept)) == {np.float32(0), np.float32(1) / np.float32(0.7)}
    np.testing.assert_array_equal(masks(rate=0.0), 1.0)


def test_dropped_without_rate():
    x, layout = jnp.ones((2, 3, 4)), layout_on(data=1)
    assert drop(x, None, 0, EMBEDDING, layout) is x


def plain(x, rate=0.25, seed=0, position=0, layer=0, site=MIXER):
    first = jnp.asarray([position, 0], jnp.uint32)
    rows = row_keys(seed, advance(first, jnp.arange(len(x))))
    return drop(x, Dropout(rate, rows), layer, site, layout_on(data=1))


def test_the_bits_never_change():
    """A run goes on with another version of JAX."""
    found = plain(jnp.ones((2, 3, 16)), seed=1, position=7, layer=2, rate=0.5) > 0
    bits = ["".join("01"[bit] for bit in row) for row in found.reshape(6, 16).tolist()]
    assert bits == [
        *("1100111001011000", "1110100110110011", "1111011110100111"),
        *("1011110110001111", "1010111101011011", "1000110011100011"),
    ]


def test_rows_beyond_32_bits_have_masks_of_their_own():
    edge = 2**32
    across = masks(position=edge - ROWS // 2)
    np.testing.assert_array_equal(across[: ROWS // 2], masks(position=edge - ROWS)[ROWS // 2 :])
    np.testing.assert_array_equal(across[ROWS // 2 :], masks(position=edge)[: ROWS // 2])
    assert (masks(position=edge) != masks(position=0)).any(axis=(1, 2)).all()
    assert (masks(position=2 * edge) != masks(position=edge)).any(axis=(1, 2)).all()


def test_the_gradient_is_dropped_alike_and_no_mask_is_saved():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8, 16)), jnp.float32)
    y, backward = jax.vjp(plain, x)
    np.testing.assert_array_equal(backward(x)[0], y)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(backward)) == 4 * 8  # keys of 64 bits


def test_bf16_is_scaled_in_f32():
    y = plain(jnp.full((4, 8, 16), 3.0, jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    assert set(np.unique(y.astype(jnp.float32))) == {0.0, 4.0}


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_as_many_as_the_rate_says_and_independent_of_one_another(rate):
    """Means, and correlations of masks that differ in one thing, within five standard errors."""
    ones = jnp.ones((32, 64, 128))
    one = jax.jit(partial(plain, rate=rate))
    base = {"seed": 0, "position": 0, "layer": 0, "site": MIXER}
    others = {"seed": 1, "position": 32, "layer": 1, "site": FFN}
    variants = [base, *(base | {key: value} for key, value in others.items())]
    dropped = [np.asarray(one(ones, **variant) == 0, np.float64) for variant in variants]
    n, deviation = ones.size, np.sqrt(rate * (1 - rate))
    for mask in dropped:
        assert abs(mask.mean() - rate) < 5 * deviation / np.sqrt(n)
    shifted = [np.roll(dropped[0], 1, axis=axis) for axis in range(3)]
    for a, b in [*combinations(dropped, 2), *((dropped[0], other) for other in shifted)]:
        assert abs(np.mean((a - rate) * (b - rate))) < 5 * deviation**2 / np.sqrt(n)
