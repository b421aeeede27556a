"""Attention over `context`, in every way of moving, beside one device that has the whole sequence.

Shapes: B rows, S tokens, H query heads, K kv heads, E head width, P devices along context.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshwright.models.kernels import attention as attention_kernel
from meshwright.models.kernels.attention import Mask, Tokens, block_kernel
from meshwright.sharding.context import attend, causal_pairs, consecutive, gather_tokens, token_at
from meshwright.sharding.rules import Dim
from runs import layout_on, shard_map

B, S, H, E = 2, 48, 8, 4
CUT = P(None, "context")

MASKS = {
    "causal": Mask(),
    "window": Mask(window=7),
    "softcap": Mask(softcap=1.5),
    "bidirectional": Mask(causal=False),
    "bidirectional window": Mask(causal=False, window=5, softcap=2.0),
}
WAYS = {
    "ring 2": {"mode": "ring", "context": 2},
    "ring 4": {"mode": "ring", "context": 4},
    "ring 8": {"mode": "ring", "context": 8},
    "zigzag 2": {"mode": "zigzag", "context": 2},
    "zigzag 4": {"mode": "zigzag", "context": 4},
    "zigzag 8": {"mode": "zigzag", "context": 8},
    "ulysses 2": {"mode": "ulysses", "context": 2},
    "ulysses 4": {"mode": "ulysses", "context": 4},
    "ulysses 8": {"mode": "ulysses", "context": 8},
    "all_gather 2": {"mode": "all_gather", "context": 2},
    "all_gather 4": {"mode": "all_gather", "context": 4},
    "all_gather 8": {"mode": "all_gather", "context": 8},
    "usp 2": {"mode": "usp", "context": 2},
    "usp 4": {"mode": "usp", "context": 4},
    "usp 8": {"mode": "usp", "context": 8},
    "usp 8 by 4": {"mode": "usp", "context": 8, "ulysses": 4},
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """More than one block wherever a device holds more than five tokens in a row."""
    monkeypatch.setattr(attention_kernel, "LARGEST_BLOCK", 5)


def documents(*rows):
    """Tokens [B, S] of packed documents of these lengths; what is left is padding."""
    segments, positions = np.full((len(rows), S), -1, np.int32), np.zeros((len(rows), S), np.int32)
    for row, lengths in enumerate(rows):
        for i, end in enumerate(np.cumsum(lengths)):
            segments[row, end - lengths[i] : end] = i
            positions[row, end - lengths[i] : end] = np.arange(lengths[i])
    return Tokens(positions, segments)


WHOLE = documents((S,), (S,))
PACKED = documents((20, 4, 7, 17), (1, 9, 26, 5))
"""Of eight devices with six tokens each: ends inside a shard and on an edge (24), documents over
three shards and more, padding at the end."""


def arrays(kv_heads=2, seed=0, dtype=np.float32):
    """q, k, v, do."""
    rng = np.random.default_rng(seed)
    heads = (H, kv_heads, kv_heads, H)
    return tuple(jnp.asarray(rng.normal(size=(B, S, n, E)), dtype) for n in heads)


def layout_of(way=None):
    return layout_on([Dim("seq", S, "train.seq_len")], **WAYS.get(way, {}))


@functools.cache
def compiled(mask, way=None):
    """(q, k, v, do, at) -> o, dq, dk, dv, whole arrays in the row's order; way None: one device."""
    layout = layout_of(way)
    order = token_at(np.arange(S), S, layout)

    def run(q, k, v, do, at):
        kernel = block_kernel(MASKS[mask], consecutive(q.shape[1], layout))
        at = gather_tokens(at, layout)
        o, transpose = jax.vjp(lambda q, k, v: attend(q, k, v, at, kernel, layout), q, k, v)
        return o, *transpose(do)

    mapped = shard_map(run, layout, CUT, CUT)

    def whole(*inputs):
        placed = jax.tree.map(lambda a: a[:, order], inputs)
        return [np.asarray(a, np.float32)[:, np.argsort(order)] for a in mapped(*placed)]

    return whole


def assert_close(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=4e-6 * np.abs(b).max())


CASES = itertools.cycle(
    [
        ("causal", PACKED, 2),
        ("window", PACKED, 1),
        ("bidirectional window", WHOLE, 8),
        ("softcap", PACKED, 4),
        ("causal", WHOLE, 1),
        ("window", WHOLE, 2),
        ("bidirectional", PACKED, 2),
    ]
)


@pytest.mark.parametrize(
    ("way", "mask", "where", "kv_heads"),
    [
        pytest.param(way, *next(CASES), marks=[pytest.mark.slow] * again)
        for again in (0, 1)
        for way in WAYS
    ],
)
def test_every_way_is_attention_on_one_device(way, mask, where, kv_heads):
    """Output and the gradients of q, k and v; the one device is tested in models/."""
    inputs = *arrays(kv_heads), where
    assert_close(compiled(mask, way)(*inputs), compiled(mask)(*inputs))


SEVERAL = ["ring 8", "zigzag 8", "ulysses 4", "all_gather 4", "usp 8"]


@pytest.mark.parametrize("way", SEVERAL)
def test_documents_of_1_to_17_tokens(way):
    """Case C15."""
    inputs = *arrays(), documents(range(1, 10), (17, 16, 15))
    assert_close(compiled("causal", way)(*inputs), compiled("causal")(*inputs))


@pytest.mark.parametrize("way", SEVERAL)
@pytest.mark.parametrize("mask", ["causal", "bidirectional window"])
def test_a_document_knows_nothing_of_its_neighbours(way, mask):
    """Cases C14 and C15. Other values in one packed document: the others' outputs and gradients
    change by exactly nothing, wherever shards cut."""
    run, inputs, others = compiled(mask, way), arrays(), arrays(seed=1)
    where = documents((20, 4, 7, 17), (2, 29, 5, 12))
    expected = run(*inputs, where)
    for document in range(4):
        inside = jnp.asarray(where.segments == document)[:, :, None, None]
        mixed = [jnp.where(inside, b, a) for a, b in zip(inputs, others, strict=True)]
        for a, b in zip(run(*mixed, where), expected, strict=True):
            changed = np.any(a != b, axis=(2, 3))
            assert changed.any() and not np.any(changed & (where.segments != document))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("way", SEVERAL)
def test_hidden_tokens_give_exact_zeros(way, dtype):
    """Case C16. A row of padding alone, and one of which most devices hold nothing but padding."""
    where = documents((), (9, 4))
    for result in compiled("causal", way)(*arrays(dtype=dtype), where):
        assert np.isfinite(result).all()
        assert not result[where.segments < 0].any() and result[where.segments >= 0].any()


@pytest.mark.parametrize("way", ["ring 8", "zigzag 8", "all_gather 8", "usp 8"])
def test_bf16_is_as_near_f32_as_on_one_device(way):
    """Sums over hops are made in f32."""
    inputs = arrays(dtype=jnp.bfloat16)
    exact = compiled("causal")(*(a.astype(jnp.float32) for a in inputs), PACKED)
    usual = compiled("causal")(*inputs, PACKED)
    for a, b, c in zip(compiled("causal", way)(*inputs, PACKED), usual, exact, strict=True):
        assert np.linalg.norm(a - c) < 1.1 * np.linalg.norm(b - c)


@pytest.mark.parametrize("way", WAYS)
def test_a_row_is_dealt_out_whole(way):
    """In zigzag group r of N holds chunks r and 2N-1-r; otherwise tokens stay in order."""
    layout = layout_of(way)
    order = token_at(np.arange(S), S, layout)
    np.testing.assert_array_equal(np.sort(order), np.arange(S))
    np.testing.assert_array_equal(token_at(jnp.arange(S, dtype=jnp.uint32), S, layout), order)
    groups = layout.size("context") // layout.resolved.ulysses
    if WAYS[way]["mode"] in ("ring", "ulysses"):
        np.testing.assert_array_equal(order, np.arange(S))
    else:
        chunks = np.arange(S).reshape(2 * groups, -1)
        held = [np.concatenate([chunks[r], chunks[-1 - r]]) for r in range(groups)]
        np.testing.assert_array_equal(order.reshape(groups, -1), held)


def computed_pairs(way):
    """Block pairs that each device computes of a causal row, over all hops."""
    layout = layout_of(way)
    groups = layout.size("context") // layout.resolved.ulysses
    order = token_at(np.arange(S), S, layout)[None].astype(np.int32)
    at = attention_kernel._cut_places(Tokens(order, 0 * order), S // 16)
    seen = np.asarray(attention_kernel._visible_pairs(at, at, Mask()))
    return seen.reshape(groups, -1).sum(1)


def test_zigzag_balances_causal_work_exactly():
    """Where a ring in order leaves the last device with (2P-1)/P of the mean."""
    for way in ("zigzag 4", "zigzag 8", "all_gather 8", "usp 8"):
        assert len(set(computed_pairs(way))) == 1
    work = computed_pairs("ring 8")
    assert work.max() / work.mean() == pytest.approx(2 - 1 / 8, rel=0.1)


def test_causal_pairs_of_each_device():
    for way in ("zigzag 4", "zigzag 8", "all_gather 8", "usp 8", "ulysses 4"):
        work = causal_pairs(S, layout_of(way))
        assert work.sum() == S * (S + 1) / 2
        assert work.max() == work.min()
    pairs = causal_pairs(1 << 20, layout_of("ring 8"))
    assert pairs.max() / pairs.mean() == pytest.approx((2 * 8 - 1) / 8, rel=1e-5)


@pytest.mark.parametrize("way", ["ring 8", "zigzag 8", "all_gather 4", "usp 8"])
def test_hidden_blocks_are_skipped(way):
    """Not-a-number in one document would spread by 0 · NaN if a block of it were touched."""
    where = documents((18, 12, 18), (18, 12, 18))
    q, k, v, do = arrays()
    k, v = k.at[:, 18:30].set(jnp.nan), v.at[:, 18:30].set(jnp.nan)
    for result in compiled("causal", way)(q, k, v, do, where):
        assert np.isfinite(result[:, :18]).all() and np.isfinite(result[:, 30:]).all()
        assert np.isnan(result[:, 18:30]).any()


@pytest.mark.parametrize("way", ["ring 8", "all_gather 8", "usp 8"])
def test_memory_is_linear_in_the_sequence(way, monkeypatch):
    """With gradients inside a scan over layers, where the masks of all hops and blocks could be
    hoisted out and stacked, and keys of all devices be saved."""
    monkeypatch.setattr(attention_kernel, "LARGEST_BLOCK", 64)

    def temp_bytes(tokens):
        layout = layout_on([Dim("seq", tokens, "train.seq_len")], **WAYS[way])

        def loss(x, at):
            kernel = block_kernel(Mask(), consecutive(x.shape[1], layout))
            at = gather_tokens(at, layout)

            def layer(x, _):
                return x + attend(x, x, x, at, kernel, layout), None

            return jnp.sum(jax.lax.scan(layer, x, None, length=4)[0])

        x = jax.ShapeDtypeStruct((1, tokens, H, 1), jnp.float32)
        at = Tokens(*[jax.ShapeDtypeStruct((1, tokens), jnp.int32)] * 2)
        run = shard_map(jax.grad(loss), layout, CUT, CUT)
        return run.lower(x, at).compile().memory_analysis().temp_size_in_bytes

    one, two, four = (temp_bytes(tokens) for tokens in (1024, 2048, 4096))
    assert 0 < four - two < 2.2 * (two - one)


@pytest.mark.parametrize("way", ["ring 8", "zigzag 8", "all_gather 8"])
def test_no_other_devices_keys_are_kept(way):
    """What the backward pass finds: q, k, v, o and the logsumexp of the device's own tokens, and
    where all tokens stand."""
    layout, kept = layout_of(way), []

    def run(q, k, v, at):
        kernel, at = (
            block_kernel(Mask(), consecutive(q.shape[1], layout)),
            gather_tokens(at, layout),
        )

        def residuals(q, k, v):
            return jax.vjp(lambda q, k, v: attend(q, k, v, at, kernel, layout), q, k, v)[1]

        kept[:] = jax.tree.leaves(jax.eval_shape(residuals, q, k, v))
        return q

    q, k, v, _ = arrays()
    shard_map(run, layout, CUT, CUT).lower(q, k, v, PACKED)
    own = [(B, S // 8, *rest) for rest in ((H, E), (H, E), (2, E), (2, E), (H,))]
    assert sorted(leaf.shape for leaf in kept if leaf.dtype == jnp.float32) == sorted(own)
    assert {leaf.shape for leaf in kept if leaf.dtype == jnp.int32} <= {(B, S)}
