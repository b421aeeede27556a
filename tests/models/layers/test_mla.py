"""Latent attention: what decoding caches, and what it costs."""

import jax
import jax.numpy as jnp

from meshwright.models.decode import empty_cache
from meshwright.models.layers.kinds import layer_flops
from meshwright.models.pattern import layers
from meshwright.trainer.config.load import load
from runs import layout_on


def test_the_cache_holds_the_latent_and_the_shared_key_and_no_heads():
    latent = load("latent").model
    each = latent.mla.kv_rank + latent.mla.rope_dim
    cache = jax.eval_shape(lambda: empty_cache(1, 1, layout_on(), latent, jnp.float32))
    assert sum(4 * leaf.size for leaf in jax.tree.leaves(cache)) == 4 * latent.layers * each
    # the same heads cached one by one
    wide = latent.mla.nope_dim + latent.mla.rope_dim + latent.mla.value_dim
    assert latent.heads * wide > 3 * each


def test_flops_are_those_of_its_matrices_and_of_visible_pairs():
    """By hand: d=64, 4 heads, ranks 48 and 32, 16 + 8 channels of a key and 12 of a value."""
    model, tokens = load("latent").model, 10
    matrices = 64 * 48 + 48 * 4 * 24 + 64 * (32 + 8) + 32 * 4 * (16 + 12) + 4 * 12 * 64
    pairs = 4 * (24 + 12) * (tokens * (tokens + 1) / 2)
    mlp = 3 * 64 * model.d_ff
    first = layers(model)[0]
    assert layer_flops(model, first, tokens) == 2 * (matrices + mlp) * tokens + 2 * pairs
