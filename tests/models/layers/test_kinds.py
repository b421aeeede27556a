"""What a model's layers say of themselves, put together: their buffers, the figures to log."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from meshwright.models.layers.kinds import first_buffers, layer_metrics, next_buffers
from runs import SMALL, make_config

EXPERTS = ("model.moe.experts=4", "model.moe.bias_update_rate=0.1")


def test_the_bias_moves_by_one_step_towards_even_load():
    model = make_config(*SMALL, *EXPERTS, "model.moe.bias_update_rate=0.5").model
    buffers = first_buffers(model)
    assert buffers["moe"].shape == (2, 4) and not buffers["moe"].any()
    load = jnp.array([[9, 1, 2, 0], [3, 3, 3, 3]])
    buffers = next_buffers(buffers, {"expert_load": load}, model)
    np.testing.assert_array_equal(buffers["moe"], [[-0.5, 0.5, 0.5, 0.5], [0, 0, 0, 0]])
    buffers = next_buffers(buffers, {"expert_load": load[:, ::-1]}, model)
    np.testing.assert_array_equal(buffers["moe"], [[0, 1, 1, 0], [0, 0, 0, 0]])


def test_the_bias_moves_the_right_way_however_many_are_chosen():
    """load times experts would outgrow 32 bits: 62.9M tokens with 8 choices each of 256."""
    model = make_config(*SMALL, "model.moe.experts=256", "model.moe.bias_update_rate=1").model
    load = np.full((2, 256), 62_914_560 * 8 // 256, np.int32)
    load[0, 3] = 62_914_560  # all tokens choose it
    load[1, 3] -= 1
    sums = {"expert_load": jnp.asarray(load)}
    bias = next_buffers(first_buffers(model), sums, model)["moe"]
    assert np.asarray(bias)[:, 3].tolist() == [-1, 1]
    assert (np.asarray(bias)[0, 4:] == 1).all() and (np.asarray(bias)[1, 4:] == -1).all()


def test_without_balance_bias_there_is_none():
    model = make_config(*SMALL, "model.moe.experts=4").model
    assert first_buffers(model) == next_buffers({}, {}, model) == {}


def test_counts_become_figures():
    load = jnp.array([[6, 2, 0, 0], [2, 2, 2, 2]])
    sums = {"loss": 1.0, "expert_load": load, "expert_rounds": 24, "dropped": jnp.array([3, 1])}
    model = make_config(*SMALL, *EXPERTS).model
    figures = layer_metrics(sums, 4, model)
    assert figures["expert_load"].tolist() == [3.0, 1.0]
    assert (figures["expert_rounds"], figures["dropped"], figures["loss"]) == (3, 0.25, 1.0)
    assert layer_metrics({"loss": 1.0}, 4, make_config(*SMALL).model) == {"loss": 1.0}
