"""Decoding with a cache gives the logits of the plain model on the whole text, at every place.

Rows of different lengths are fed in pieces, right-padded, then token by token.
"""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import reference
from meshwright.models.batch import Batch
from meshwright.models.decode import empty_cache, extend
from meshwright.sharding.layout import specs
from meshwright.sharding.rules import ZERO_AXES
from meshwright.trainer.config.load import override
from meshwright.trainer.optim.precision import DTYPES
from meshwright.trainer.state import lay_out
from runs import SMALL, first_devices, make_config, random_params, shard_map

PIECE, PIECES, STEPS, SLOTS = 5, 3, 4, 24
LENGTHS = np.array([1, 5, 6, 15, 9, 3, 10, 14], np.int32)
TEXT = np.random.default_rng(0).integers(0, 257, (8, PIECE * PIECES + STEPS), dtype=np.int32)


def feed(params, text, lengths, *, layout, config, buffers=None):
    """Logits after each piece of the prompts, [PIECES, B, V], and after each of STEPS further
    tokens, [STEPS, B, V], with the cache at the end."""
    dtype = DTYPES[config.precision.compute]
    run = partial(
        extend,
        params,
        slots=SLOTS,
        layout=layout,
        config=config.model,
        dtype=dtype,
        buffers=buffers,
    )

    def piece(cache, start):
        place = (start + jnp.arange(PIECE))[None]
        tokens = jax.lax.dynamic_slice_in_dim(text, start, PIECE, axis=1)
        logits, cache = run(cache, tokens, jnp.where(place < lengths[:, None], place, -1))
        return cache, logits

    def one(cache, step):
        place = (lengths + step)[:, None]
        logits, cache = run(cache, jnp.take_along_axis(text, place, axis=1), place)
        return cache, logits

    cache = empty_cache(len(text), SLOTS, layout, config.model, dtype)
    cache, prompt = jax.lax.scan(piece, cache, PIECE * jnp.arange(PIECES))
    cache, continuation = jax.lax.scan(one, cache, jnp.arange(STEPS))
    return prompt, continuation, cache


def compiled(config, buffers=None):
    layout = lay_out(config, first_devices(config))
    params = random_params(config)
    rows, kept = P(ZERO_AXES), P(None, ZERO_AXES)
    run = shard_map(
        partial(feed, layout=layout, config=config, buffers=buffers),
        layout,
        (specs(params, layout.param_spec), rows, rows),
        (kept, kept, P(None, ZERO_AXES, "tensor")),
    )
    return partial(run, params)


def expected(config, params=None):
    """What `feed` gives, and which of the first are of rows that had a token in that piece."""
    params = random_params(config) if params is None else params
    place = np.broadcast_to(np.arange(TEXT.shape[1], dtype=np.int32), TEXT.shape)
    batch = Batch(TEXT, TEXT, np.ones(TEXT.shape, np.float32), place, 0 * place)
    whole = jax.jit(partial(reference.logits, model=config.model))(params, batch)
    ends = PIECE * np.arange(1, PIECES + 1)[:, None]
    row = np.arange(len(TEXT))
    prompt = np.asarray(whole)[row, np.minimum(LENGTHS, ends) - 1]
    continuation = np.asarray(whole)[row, LENGTHS + np.arange(STEPS)[:, None]]
    return prompt, continuation, ends - PIECE < LENGTHS


RICH = (
    "model.bias=all",
    "model.attention_sink=true",
    "model.qk_norm=head",
    "model.attention_softcap=2.0",
    "model.logit_softcap=3.0",
)
TIED = ("model.bias=qkv", "model.tie_embeddings=true", "model.window=4")
ODD = (
    "model.vocab_multiple=6",
    "model.d_model=15",
    "model.heads=6",
    "model.kv_heads=3",
    "model.head_dim=6",
    "train.batch_size=12",
)
EXPERTS = ("model.moe.experts=8", "model.moe.experts_per_token=2", "model.moe.shared_experts=1")
SIGMOID = (
    *EXPERTS,
    "model.dense_layers=1",
    "model.moe.scores=sigmoid",
    "model.moe.groups=4",
    "model.moe.groups_per_token=2",
)


LOCAL_GLOBAL = (
    *("model.layers=3", "model.window_pattern=[4,null]", "model.local_rope_theta=100.0"),
    *("model.rope_pattern=[true,false]", "model.qk_norm=all"),
)
SANDWICH = ("model.norm=sandwich", "model.attention_gate=true")
LATENT = (
    *("model.layers=3", "model.mixer=mla", "model.kv_heads=null", "model.mla.kv_rank=8"),
    *("model.mla.q_rank=12", "model.mla.nope_dim=4", "model.mla.rope_dim=2"),
    *("model.mla.value_dim=6", "model.attention_sink=true", "model.norm=post", *SIGMOID),
)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ((), ()),
        (LOCAL_GLOBAL, ()),
        (LOCAL_GLOBAL, ("mesh.fsdp=4", "mesh.tensor=2")),
        (SANDWICH, ("mesh.data=2", "mesh.tensor=2")),
        (LATENT, ()),
        (LATENT, ("mesh.fsdp=2", "mesh.expert=2", "mesh.tensor=2")),
        ((), ("mesh.data=8",)),
        (EXPERTS, ("mesh.expert=2", "mesh.tensor=4", "layout.experts=[expert,tensor]")),
        (SIGMOID, ("mesh.fsdp=2", "mesh.expert=4")),
        (RICH, ("mesh.data=2", "mesh.tensor=4", "layout.zero=2")),
        (TIED, ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")),
        (ODD, ("mesh.fsdp=4", "mesh.tensor=2")),
    ],
)
def test_equals_the_whole_text_fed_again(model, layout):
    config = make_config(*SMALL, *model, *layout, "layout.sequence_parallel=false")
    prompt, continuation, _ = compiled(config)(TEXT, LENGTHS)
    right_prompt, right_continuation, fed = expected(config)
    scale = np.abs(right_prompt).max()
    for logits, right in (
        (np.asarray(prompt)[fed], right_prompt[fed]),
        (continuation, right_continuation),
    ):
        np.testing.assert_allclose(logits / scale, right / scale, rtol=0, atol=2e-6)


def test_capacity_drops_no_token_of_a_continuation():
    """It is training's: with it the same text would lose half of its choices."""
    limited = ("model.moe.capacity_factor=0.5", "model.moe.routing_group=8")
    config = make_config(*SMALL, *EXPERTS, *limited, "layout.sequence_parallel=false")
    _, continuation, _ = compiled(config)(TEXT, LENGTHS)
    right = expected(
        override(config, "model.moe.capacity_factor=null", "model.moe.routing_group=null")
    )[1]
    np.testing.assert_allclose(continuation, right, rtol=0, atol=2e-6 * np.abs(right).max())


def test_the_bias_of_routers_chooses_and_does_not_weigh():
    """One that leaves a token two experts is a model of these two."""
    config = make_config(*SMALL, "model.moe.experts=8", "layout.sequence_parallel=false")
    bias = jnp.zeros((2, 8)).at[:, jnp.array([2, 5])].set(100.0)
    _, continuation, _ = compiled(config, {"moe": bias})(TEXT, LENGTHS)
    params = random_params(config)
    for name, dim in (("router", -1), ("gate", 1), ("up", 1), ("down", 1)):
        param = getattr(params.layers.moe, name)
        setattr(params.layers.moe, name, param.replace(np.take(param.get_value(), [2, 5], dim)))
    right = expected(override(config, "model.moe.experts=2"), params)[1]
    np.testing.assert_allclose(continuation, right, rtol=0, atol=2e-6 * np.abs(right).max())


def test_padding_leaves_no_trace():
    """Not a bit differs by what stands after a prompt; slots that no token has reached are zero."""
    config = make_config(*SMALL, "layout.sequence_parallel=false")
    run = compiled(config)
    _, logits, cache = run(TEXT, LENGTHS)
    place = np.arange(TEXT.shape[1])
    after = place >= LENGTHS[:, None] + STEPS
    _, again, cache_again = run(np.where(after, 256, TEXT), LENGTHS)
    chex.assert_trees_all_equal((logits, cache), (again, cache_again))
    written = np.arange(SLOTS) < LENGTHS[:, None] + STEPS
    for a in cache["attention"]:  # [L, B, K, T, head_dim]
        found = np.any(np.asarray(a) != 0, axis=-1)
        np.testing.assert_array_equal(found, np.broadcast_to(written[None, :, None], found.shape))


def test_bf16_stays_near_f32():
    config = make_config(
        *SMALL, *RICH, "precision.compute=bf16", "mesh.tensor=4", "layout.sequence_parallel=false"
    )
    _, logits, cache = compiled(config)(TEXT, LENGTHS)
    assert {leaf.dtype for leaf in jax.tree.leaves(cache)} == {jnp.dtype(jnp.bfloat16)}
    assert logits.dtype == np.float32
    right = expected(config)[1]
    np.testing.assert_allclose(logits, right, rtol=0, atol=0.02 * np.abs(right).max())
