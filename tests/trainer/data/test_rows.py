from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.trainer.data.rows import row_count, rows_at

document_lengths = st.lists(st.integers(1, 12), min_size=1, max_size=12)


def plain_row(split, row, seq_len):
    """One row, token by token."""
    starts = set(split.offsets.tolist())
    segment, position, cells = 0, 0, []
    for place in range(row * seq_len, (row + 1) * seq_len):
        if place >= len(split.tokens):
            cells.append((0, 0, 0, 0, -1))
            continue
        if place in starts and cells:
            segment, position = segment + 1, 0
        has_target = place + 1 not in starts
        target = split.tokens[place + 1] if has_target else 0
        cells.append((split.tokens[place], target, has_target, position, segment))
        position += 1
    return np.array(cells).T


@given(document_lengths, st.integers(1, 9), st.integers(0, 3))
def test_rows_equal_plain_ones(make_split, lengths, seq_len, beyond):
    split = make_split(lengths)
    numbers = np.arange(row_count(split, seq_len, partial=True) + beyond)[::-1]
    rows = rows_at(split, numbers, seq_len)
    for name, values in rows._asdict().items():
        assert values.dtype == (np.float32 if name == "weights" else np.int32)
        assert values.shape == (len(numbers), seq_len)
    for i, number in enumerate(numbers):
        np.testing.assert_array_equal(
            [values[i] for values in rows], plain_row(split, number, seq_len)
        )


@given(document_lengths, st.integers(1, 9))
def test_every_target_stands_in_one_row(make_split, lengths, seq_len):
    """Every token but the documents' first is a target exactly once."""
    split = make_split(lengths)
    count = row_count(split, seq_len, partial=True)
    rows = rows_at(split, np.arange(count), seq_len)
    targets = rows.targets[rows.weights == 1]
    np.testing.assert_array_equal(targets, np.delete(split.tokens, split.offsets[:-1]))


@given(document_lengths, st.integers(1, 9))
def test_full_rows_have_no_padding_and_a_next_token(make_split, lengths, seq_len):
    split = make_split(lengths)
    count = row_count(split, seq_len)
    assert count * seq_len + 1 <= len(split.tokens) < (count + 1) * seq_len + 1
    rows = rows_at(split, np.arange(count), seq_len)
    assert (rows.segments >= 0).all()
    np.testing.assert_array_equal(rows.tokens.ravel(), split.tokens[: count * seq_len])


def test_a_row_on_paper(make_split):
    split = make_split([2, 4])
    a, b, end, c, d, e, f, _ = split.tokens
    rows = rows_at(split, np.array([0, 1]), 5)
    np.testing.assert_array_equal(rows.tokens, [[a, b, end, c, d], [e, f, end, 0, 0]])
    np.testing.assert_array_equal(rows.targets, [[b, end, 0, d, e], [f, end, 0, 0, 0]])
    np.testing.assert_array_equal(rows.weights, [[1, 1, 0, 1, 1], [1, 1, 0, 0, 0]])
    np.testing.assert_array_equal(rows.positions, [[0, 1, 2, 0, 1], [0, 1, 2, 0, 0]])
    np.testing.assert_array_equal(rows.segments, [[0, 0, 0, 1, 1], [0, 0, 0, -1, -1]])


def test_damaged_tokens_are_refused(make_split):
    split = make_split([20])
    split.tokens[9] = 300
    rows_at(split, np.array([0]), 5)
    with pytest.raises(
        ValueError, match=r"train\.tokens: token id 300 at token 9 is beyond .* 256"
    ):
        rows_at(split, np.array([0, 1]), 5)


def test_damaged_offsets_are_refused(make_split):
    split = make_split([4, 4, 4])
    shifted = replace(split, offsets=np.array([0, 5, 9, 15]))
    rows_at(shifted, np.array([0]), 5)
    with pytest.raises(
        ValueError, match=r"train\.tokens: end-of-text and document offsets disagree"
    ):
        rows_at(shifted, np.array([1]), 5)
