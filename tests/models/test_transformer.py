import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.models.batch import Batch
from meshwright.models.transformer import blocks, chunk_at, embed, layer_inputs
from meshwright.trainer.state import abstract_state, named_leaves
from runs import SMALL, layout_on, make_config, random_params

TOKENS = 12


def tokens_of_documents(*rows):
    """A micro-batch [B, S] of documents of these lengths, the rest padding."""
    segments = np.full((len(rows), TOKENS), -1, np.int32)
    positions = np.zeros((len(rows), TOKENS), np.int32)
    for row, lengths in enumerate(rows):
        ends = np.cumsum(lengths)
        for i, (length, end) in enumerate(zip(lengths, ends, strict=True)):
            segments[row, end - length : end] = i
            positions[row, end - length : end] = np.arange(length)
    ids = np.random.default_rng(0).integers(0, 257, segments.shape, dtype=np.int32)
    return Batch(ids, ids, np.ones(segments.shape, np.float32), positions, segments)


def all_blocks(params, x, batch, layout, config):
    inputs = layer_inputs(batch, layout, config.model)
    return blocks(params.layers, x, chunk_at(0, 1, config.model), inputs, config.remat)[0]


def seen(batch, *overrides):
    """[B, S, S]: whether the output at a place (second dim) has a gradient by the input at another
    (third), through all blocks."""
    config = make_config(*SMALL, *overrides)
    params, layout = random_params(config), layout_on()

    def gradients(params, batch):
        x = embed(params, batch, layout, jnp.float32)
        _, transpose = jax.vjp(lambda x: all_blocks(params, x, batch, layout, config), x)
        at = jnp.eye(TOKENS).reshape(TOKENS, 1, TOKENS, 1)
        return jax.vmap(lambda at: transpose(jnp.broadcast_to(at, x.shape))[0])(at)

    by_input = np.asarray(jax.jit(gradients)(params, batch))
    assert np.isfinite(by_input).all()
    return np.moveaxis((by_input != 0).any(axis=-1), 0, 1)


@pytest.mark.parametrize("window", [None, 3])
def test_gradients_vanish_exactly_where_nothing_may_be_seen(window):
    """Later tokens, other documents, padding; with a window what lies before it in every layer."""
    batch = tokens_of_documents((12,), (4, 8), (5, 3))
    found = seen(batch, f"model.window={'null' if window is None else window}")
    reach = TOKENS if window is None else 2 * (window - 1)  # two layers
    place = np.arange(TOKENS)
    before = place[:, None] - place[None, :]
    visible = (before >= 0) & (before <= reach)
    same = batch.segments[:, :, None] == batch.segments[:, None, :]
    real = batch.segments[:, :, None] >= 0
    # padding sees nothing but itself, along the residual stream
    expected = np.where(real, same & visible, before == 0)
    np.testing.assert_array_equal(found, expected)


def test_a_document_is_the_same_wherever_it_stands():
    """At two places of a row its outputs are the same."""
    config = make_config(*SMALL)
    batch = tokens_of_documents((6, 6))
    ids = np.concatenate([batch.tokens[:, :6]] * 2, axis=1)
    batch = Batch(ids, ids, batch.weights, batch.positions, batch.segments)
    layout, params = layout_on(), random_params(config)

    def run(params, batch):
        x = embed(params, batch, layout, jnp.float32)
        return all_blocks(params, x, batch, layout, config)

    first, second = np.split(np.asarray(jax.jit(run)(params, batch)), 2, axis=1)
    np.testing.assert_allclose(first, second, rtol=0, atol=1e-6 * np.abs(first).max())


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        ((), set()),
        (("model.tie_embeddings=true",), {"unembed"}),
        (
            ("model.bias=qkv",),
            {"layers.attention.q_bias", "layers.attention.k_bias", "layers.attention.v_bias"},
        ),
        (("model.qk_norm=head",), {"layers.attention.q_norm", "layers.attention.k_norm"}),
    ],
)
def test_an_option_adds_or_removes_its_parameters_alone(overrides, changes):
    leaves = {
        name: leaf.shape
        for name, leaf in named_leaves(
            abstract_state(make_config(*SMALL, *overrides)).params
        ).items()
    }
    plain = {
        "embed": (384, 16),
        "layers.attention.norm": (2, 16),
        "layers.attention.q": (2, 16, 4, 4),
        "layers.attention.k": (2, 16, 2, 4),
        "layers.attention.v": (2, 16, 2, 4),
        "layers.attention.o": (2, 4, 4, 16),
        "layers.swiglu.norm": (2, 16),
        "layers.swiglu.gate": (2, 16, 24),
        "layers.swiglu.up": (2, 16, 24),
        "layers.swiglu.down": (2, 24, 16),
        "norm": (16,),
        "unembed": (384, 16),
    }
    assert leaves.keys() ^ plain.keys() == changes
    assert all(leaves[name] == shape for name, shape in plain.items() if name in leaves)


def test_all_biases():
    params = abstract_state(make_config(*SMALL, "model.bias=all")).params
    biases = {name for name in named_leaves(params) if name.endswith("_bias")}
    projections = {"attention.q", "attention.k", "attention.v", "attention.o"}
    projections |= {"swiglu.gate", "swiglu.up", "swiglu.down"}
    assert biases == {f"layers.{name}_bias" for name in projections}
