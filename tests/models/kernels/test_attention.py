"""The blockwise kernel against a plain softmax over whole score matrices.

Shapes: B rows, S tokens, H query heads, K kv heads, E head width.
"""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from meshwright.models.kernels import attention as attention_kernel
from meshwright.models.kernels.attention import Mask, Tokens, block_kernel
from meshwright.sharding.context import attend
from runs import layout_on

B, S, H, K, E = 2, 43, 4, 2, 8

MASKS = {
    "causal": Mask(),
    "window": Mask(window=5),
    "softcap": Mask(softcap=1.5),
    "bidirectional": Mask(causal=False),
    "bidirectional window": Mask(causal=False, window=4, softcap=2.0),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Three blocks of 15 tokens, the last one padded."""
    monkeypatch.setattr(attention_kernel, "LARGEST_BLOCK", 16)


def documents(*rows):
    """positions, segments [B, S] of packed documents of these lengths; what is left is padding."""
    segments = np.full((len(rows), S), -1, np.int32)
    positions = np.zeros((len(rows), S), np.int32)
    for row, lengths in enumerate(rows):
        ends = np.cumsum(lengths)
        for i, (length, end) in enumerate(zip(lengths, ends, strict=True)):
            segments[row, end - length : end] = i
            positions[row, end - length : end] = np.arange(length)
    return positions, segments


PACKED = documents((20, 3, 17), (7, 9, 27))
WHOLE = documents((S,), (S,))


def random_qkv(kv_heads=K, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = (B, S, H, E), (B, S, kv_heads, E), (B, S, kv_heads, E)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def visible_pairs(positions, segments, mask):
    """[B, query, key], from the definition."""
    distance = positions[:, :, None].astype(int) - positions[:, None, :]
    seen = (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] >= 0)
    if mask.causal:
        seen &= distance >= 0
    if mask.window:
        seen &= abs(distance) < mask.window
    return seen


def attention(q, k, v, positions, segments, mask):
    """The kernel as one device has it."""
    at, kernel = Tokens(positions, segments), block_kernel(mask, q.shape[1])
    return attend(q, k, v, at, kernel, layout_on())


def plain(q, k, v, positions, segments, mask):
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
    score = jnp.einsum("bqhe,bkhe->bhqk", q, k) / np.sqrt(E)
    if mask.softcap:
        score = mask.softcap * jnp.tanh(score / mask.softcap)
    seen = visible_pairs(positions, segments, mask)[:, None]
    weight = jax.nn.softmax(jnp.where(seen, score, -1e30)) * seen.any(-1, keepdims=True)
    return jnp.einsum("bhqk,bkhe->bqhe", weight, v)


@functools.cache
def with_gradients(function, mask):
    """Compiled (q, k, v, do, positions, segments) -> o, dq, dk, dv."""

    def run(q, k, v, do, *where):
        o, transpose = jax.vjp(lambda q, k, v: function(q, k, v, *where, mask), q, k, v)
        return (o, *transpose(do))

    return jax.jit(run)


@pytest.mark.parametrize(
    ("mask", "where", "kv_heads"),
    [
        *((name, PACKED, K) for name in MASKS),
        ("causal", WHOLE, 1),
    ],
)
def test_equals_plain_attention(mask, where, kv_heads):
    inputs = (*random_qkv(kv_heads), random_qkv(seed=1)[0], *where)
    found = with_gradients(attention, MASKS[mask])(*inputs)
    expected = with_gradients(plain, MASKS[mask])(*inputs)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())


def test_scores_far_apart_neither_overflow_nor_vanish():
    q, k, v = random_qkv()
    inputs = (100 * q, 100 * k, v, random_qkv(seed=1)[0], *PACKED)
    found = with_gradients(attention, Mask())(*inputs)
    expected = with_gradients(plain, Mask())(*inputs)
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-3)
    assert all(np.isfinite(a).all() for a in found)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("mask", ["causal", "bidirectional window"])
def test_hidden_tokens_give_exact_zeros(mask, dtype):
    """Case C16. A row of padding alone, and one that ends in padding wider than a block."""
    positions, segments = documents((), (9, 4))
    inputs = (*random_qkv(dtype=dtype), random_qkv(seed=1, dtype=dtype)[0])
    for result in with_gradients(attention, MASKS[mask])(*inputs, positions, segments):
        assert result.dtype == dtype
        result = np.asarray(result, np.float32)
        assert np.isfinite(result).all()
        assert not result[segments < 0].any() and result[segments >= 0].any()


def test_bf16_stays_near_f32():
    inputs = (*random_qkv(dtype=jnp.bfloat16), random_qkv(seed=1, dtype=jnp.bfloat16)[0])
    rough = with_gradients(attention, Mask())(*inputs, *PACKED)
    wide = with_gradients(attention, Mask())(*(a.astype(jnp.float32) for a in inputs), *PACKED)
    for a, b in zip(rough, wide, strict=True):
        np.testing.assert_allclose(np.float32(a), b, rtol=0, atol=0.02 * np.abs(b).max())


@pytest.mark.parametrize("mask", ["causal", "bidirectional window"])
def test_a_document_knows_nothing_of_its_neighbours(mask):
    """Case C14. Other values in one packed document, ends inside blocks and a document over three
    of them: the others' outputs and gradients change by exactly nothing."""
    positions, segments = documents((20, 3, 20), (7, 33, 3))
    run = with_gradients(attention, MASKS[mask])
    inputs = (*random_qkv(), random_qkv(seed=1)[0])
    others = (*random_qkv(seed=2), random_qkv(seed=3)[0])
    expected = run(*inputs, positions, segments)
    for document in range(3):
        inside = jnp.asarray(segments == document)[:, :, None, None]
        mixed = (jnp.where(inside, b, a) for a, b in zip(inputs, others, strict=True))
        for a, b in zip(run(*mixed, positions, segments), expected, strict=True):
            changed = np.any(np.asarray(a) != b, axis=(2, 3))
            assert changed.any() and not np.any(changed & (segments != document))


@pytest.mark.parametrize("mask", ["causal", "bidirectional", "window"])
def test_hidden_blocks_are_skipped(mask):
    """Blocks here are documents; not-a-number in one would spread by 0 · NaN if it were touched."""
    q, k, v = random_qkv()
    k, v = k.at[:, 15:30].set(jnp.nan), v.at[:, 15:30].set(jnp.nan)
    inputs = (q, k, v, random_qkv(seed=1)[0], *documents((15, 15, 13), (15, 15, 13)))
    for result in with_gradients(attention, MASKS[mask])(*inputs):
        assert np.isfinite(result[:, :15]).all() and np.isfinite(result[:, 30:]).all()
        assert np.isnan(result[:, 15:30]).any()


def test_blocks_after_the_query_and_before_the_window_are_skipped():
    """In one document: what comes after a query block, and what lies whole windows before it."""
    q, k, v = random_qkv()
    do = jnp.zeros_like(q)
    late = with_gradients(attention, Mask())(q, k.at[:, 30:].set(jnp.nan), v, do, *WHOLE)[0]
    assert np.isfinite(late[:, :30]).all() and np.isnan(late[:, 30:]).all()
    early = k.at[:, :15].set(jnp.nan)
    early = with_gradients(attention, MASKS["window"])(q, early, v, do, *WHOLE)[0]
    assert np.isnan(early[:, :19]).all() and np.isfinite(early[:, 30:]).all()


EXTENTS = [Mask(causal, window) for causal in (True, False) for window in (None, 1, 3)]


@jax.jit
def visible_blocks(at):
    return [attention_kernel._visible_pairs(at, at, mask) for mask in EXTENTS]


@given(data=st.data())
def test_a_block_pair_with_a_visible_pair_is_never_skipped(data):
    """Two rows of random documents in three blocks of four tokens, in any order, with padding."""
    rows = []
    for _ in range(2):
        lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
        tokens = [(document, at) for document, n in enumerate(lengths) for at in range(n)]
        tokens = (tokens + [(-1, 0)] * 12)[:12]
        rows.append(data.draw(st.one_of(st.just(tokens), st.permutations(tokens))))
    segments, positions = np.moveaxis(np.asarray(rows, np.int32), 2, 0)
    blocks = [np.moveaxis(a.reshape(2, 3, 4), 1, 0) for a in (positions, segments)]
    for mask, possible in zip(EXTENTS, visible_blocks(Tokens(*blocks)), strict=True):
        visible = visible_pairs(positions, segments, mask).any(0)
        assert not np.any(visible.reshape(3, 4, 3, 4).any((1, 3)) & ~np.asarray(possible))


def test_memory_is_linear_in_the_sequence(monkeypatch):
    """With gradients inside a scan over layers, where masks of all block pairs could be hoisted out
    and stacked."""
    monkeypatch.undo()

    def temp_bytes(tokens):
        def loss(x, positions, segments):
            def layer(x, _):
                return x + attention(x, x, x, positions, segments, Mask()), None

            return jnp.sum(jax.lax.scan(layer, x, None, length=4)[0])

        where = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
        x = jax.ShapeDtypeStruct((1, tokens, 1, 8), jnp.float32)
        compiled = jax.jit(jax.grad(loss)).lower(x, where, where).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    one, two, four = (temp_bytes(tokens) for tokens in (1024, 2048, 4096))
    assert 0 < four - two < 2.2 * (two - one)
