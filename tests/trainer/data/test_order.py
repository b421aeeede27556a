import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.trainer.data.order import permute

seeds = st.integers(0, 2**64 - 1)
epochs = st.integers(0, 2**40)


def plain_permute(index: int, n: int, seed: int, epoch: int) -> int:
    """The same permutation in Python integers."""

    def mix(x):
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    key = mix((mix(seed) + epoch) % 2**64)
    while True:
        left, right = divmod(index, b)
        for turn in range(8):
            round_key = mix((key + turn) % 2**64)
            if turn % 2 == 0:
                left = (left + mix((round_key + right) % 2**64)) % a
            else:
                right = (right + mix((round_key + left) % 2**64)) % b
        index = left * b + right
        if index < n:
            return index


def test_golden_order():
    """The data order of every run ever made with Meshwright. Never change these numbers."""
    np.testing.assert_array_equal(
        permute(np.arange(12), 12, 0, 0), [6, 8, 11, 1, 10, 0, 3, 4, 5, 2, 9, 7]
    )
    np.testing.assert_array_equal(
        permute(np.arange(12), 12, 0, 1), [5, 6, 0, 10, 4, 9, 11, 8, 7, 2, 3, 1]
    )
    np.testing.assert_array_equal(
        permute(np.arange(12), 12, 1, 0), [9, 11, 4, 2, 10, 6, 8, 3, 0, 7, 5, 1]
    )
    np.testing.assert_array_equal(
        permute(np.arange(5), 93_729, 7, 3), [58338, 82165, 1034, 1938, 72866]
    )
    np.testing.assert_array_equal(
        permute(np.arange(3), 10**15, 2**64 - 1, 2**40),
        [891398581463327, 374630493971738, 758881227378660],
    )


@given(st.integers(1, 3000), seeds, epochs)
def test_every_epoch_holds_every_row_once(n, seed, epoch):
    rows = permute(np.arange(n), n, seed, epoch)
    assert rows.dtype == np.int64
    np.testing.assert_array_equal(np.sort(rows), np.arange(n))


@given(st.integers(1, 10**15), seeds, epochs, st.data())
def test_equals_plain_integers(n, seed, epoch, data):
    index = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))
    expected = [plain_permute(i, n, seed, epoch) for i in index]
    np.testing.assert_array_equal(permute(np.array(index), n, seed, epoch), expected)


def test_epochs_may_be_given_row_by_row():
    index, epoch = np.array([5, 6, 0, 1]), np.array([2, 2, 3, 3])
    expected = np.append(permute(index[:2], 7, 9, 2), permute(index[2:], 7, 9, 3))
    np.testing.assert_array_equal(permute(index, 7, 9, epoch), expected)


def test_orders_are_uniform():
    """Over 6,000 epochs each of 7 rows is as often at each place and after each other row."""
    n, trials = 7, 6000
    epoch = np.repeat(np.arange(trials), n)
    orders = permute(np.tile(np.arange(n), trials), n, 0, epoch).reshape(trials, n)
    places = np.zeros((n, n))
    for place in range(n):
        places[place] = np.bincount(orders[:, place], minlength=n)
    # chi-square with 36 degrees of freedom: 72 is its 0.9997 quantile
    assert ((places - trials / n) ** 2 / (trials / n)).sum() < 72
    pairs = np.bincount(orders[:, :-1].ravel() * n + orders[:, 1:].ravel(), minlength=n * n)
    off_diagonal = pairs.reshape(n, n)[~np.eye(n, dtype=bool)]
    assert np.abs(off_diagonal / (trials / n) - 1).max() < 0.15


def test_neighbouring_rows_part():
    """No trace of the identity: rows that follow in the stream are as far apart as random ones."""
    n = 100_000
    for seed in range(4):
        rows = permute(np.arange(n), n, seed, 0)
        assert abs(np.abs(np.diff(rows)).mean() / n - 1 / 3) < 0.01
        assert (np.diff(rows) == 1).sum() < 10
