"""Positions of 64 bits in two words, on the host and on devices."""

import jax.numpy as jnp
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from meshwright.models.position import advance, position_number, position_words

EDGES = [2**31, 2**32, 2**33, 2**63]


@given(st.integers(0, 2**64 - 1))
def test_words_hold_any_position(position):
    words = position_words(position)
    assert words.dtype == np.uint32
    assert position_number(words) == position


@given(st.integers(0, 2**63), st.integers(0, 2**32 - 1))
@example(2**31 - 1, 1)
@example(2**32 - 1, 1)
@example(2**32 - 1, 2**32 - 1)
@example(2**33 - 5, 17)
def test_advance_carries_into_the_high_word(position, rows):
    words = advance(jnp.asarray(position_words(position)), np.uint32(rows))
    assert position_number(words) == position + rows


def test_many_rows_at_once():
    for edge in EDGES:
        words = advance(jnp.asarray(position_words(edge - 3)), jnp.arange(6))
        assert [position_number(row) for row in words] == [edge - 3 + i for i in range(6)]
