"""The router's choices: ties, alike experts, equal claims, steps of the bias."""

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from meshwright.models.layers.router import route
from runs import make_config

SHAPE = ("model.d_model=8", "model.heads=2", "model.d_ff=12", "model.moe.experts=4")


def routed(logits, *overrides, bias=None):
    """Experts of tokens that are all real; each logit is off by some last bits, as in a layout that
    adds up in another order."""
    config = make_config(*SHAPE, *overrides).model
    noise = np.random.default_rng(0).uniform(-4e-7, 4e-7, logits.shape)
    logits = jnp.asarray(logits * (1 + noise) + 1e-7 * noise, jnp.float32)
    return route(logits, jnp.ones(logits.shape[:2], bool), bias, None, config.moe).experts


WIDE = ("model.moe.experts=16", "model.moe.experts_per_token=3")
SCORES = ("model.moe.scores=softmax", "model.moe.scores=sigmoid")


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("level", [0.0, -3.7, 2.3])
def test_equal_logits_choose_the_lowest_experts_of_the_lowest_groups(scores, level):
    logits = np.full((2, 8, 16), level)
    assert_array_equal(routed(logits, *WIDE, scores), np.broadcast_to([0, 1, 2], (2, 8, 3)))
    groups = ("model.moe.groups=4", "model.moe.groups_per_token=2")
    logits[..., 0:4] = level - 1  # the two lowest of the groups that are equally good
    expected = np.broadcast_to([4, 5, 6], (2, 8, 3))
    assert_array_equal(routed(logits, *WIDE, scores, *groups), expected)


@pytest.mark.parametrize("scores", SCORES)
def test_experts_that_are_alike_are_chosen_by_number(scores):
    """Each expert of the upper half has a router column like one of the lower half's."""
    half = np.random.default_rng(1).normal(size=(4, 32, 8))
    best = np.argsort(-half, axis=-1)[..., :2]
    expected = np.stack([best[..., 0], best[..., 0] + 8, best[..., 1]], axis=-1)
    assert_array_equal(routed(np.concatenate([half, half], axis=-1), *WIDE, scores), expected)


@pytest.mark.parametrize("scores", SCORES)
def test_equal_claims_go_by_choice_and_then_by_position(scores):
    """Repeated tokens: each expert takes the first of them."""
    logits = np.broadcast_to(np.random.default_rng(2).normal(size=(4, 1, 16)), (4, 16, 16))
    room = (
        "model.moe.capacity_factor=1.0",
        "model.moe.routing_group=16",
        "model.moe.overflow=probability",
    )
    found = routed(logits, *WIDE, *room, scores)
    best = np.argsort(-logits, axis=-1)[..., :3]
    served = np.arange(16)[None, :, None] < 3
    assert_array_equal(found, np.where(served, best, 16))


@pytest.mark.parametrize("level", [0.3, 0.97])
def test_a_step_of_the_bias_counts(level):
    logits, bias = np.full((1, 4, 16), np.log(level / (1 - level))), np.zeros(16, np.float32)
    bias[[5, 9, 11]] = 0.001
    found = routed(logits, *WIDE, "model.moe.scores=sigmoid", bias=jnp.asarray(bias))
    assert_array_equal(found, np.broadcast_to([5, 9, 11], (1, 4, 3)))
