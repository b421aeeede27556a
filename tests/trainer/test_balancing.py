"""Experts in balance: the bias of routers, the figures that are logged, a whole run with both."""

from __future__ import annotations

import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.models.layers.kinds import first_buffers, layer_metrics, next_buffers
from meshwright.trainer.load import override
from meshwright.trainer.loop import train

EXPERTS = ("model.moe.experts=4", "model.moe.bias_update_rate=0.1")


def test_the_bias_moves_by_one_step_towards_even_load(small_config):
    model = override(small_config, *EXPERTS, "model.moe.bias_update_rate=0.5").model
    buffers = first_buffers(model)
    assert buffers["moe"].shape == (2, 4) and not buffers["moe"].any()
    load = jnp.array([[9, 1, 2, 0], [3, 3, 3, 3]])
    buffers = next_buffers(buffers, {"expert_load": load}, model)
    np.testing.assert_array_equal(buffers["moe"], [[-0.5, 0.5, 0.5, 0.5], [0, 0, 0, 0]])
    buffers = next_buffers(buffers, {"expert_load": load[:, ::-1]}, model)
    np.testing.assert_array_equal(buffers["moe"], [[0, 1, 1, 0], [0, 0, 0, 0]])


def test_the_bias_moves_the_right_way_however_many_are_chosen(small_config):
    """load times experts would outgrow 32 bits: 62.9M tokens with 8 choices each of 256."""
    model = override(small_config, "model.moe.experts=256", "model.moe.bias_update_rate=1").model
    load = np.full((2, 256), 62_914_560 * 8 // 256, np.int32)
    load[0, 3] = 62_914_560  # all tokens choose it
    load[1, 3] -= 1
    sums = {"expert_load": jnp.asarray(load)}
    bias = next_buffers(first_buffers(model), sums, model)["moe"]
    assert np.asarray(bias)[:, 3].tolist() == [-1, 1]
    assert (np.asarray(bias)[0, 4:] == 1).all() and (np.asarray(bias)[1, 4:] == -1).all()


def test_without_balance_bias_there_is_none(small_config):
    model = override(small_config, "model.moe.experts=4").model
    assert first_buffers(model) == next_buffers({}, {}, model) == {}


def test_counts_become_figures(small_config):
    load = jnp.array([[6, 2, 0, 0], [2, 2, 2, 2]])
    sums = {"loss": 1.0, "expert_load": load, "expert_rounds": 24, "dropped": jnp.array([3, 1])}
    model = override(small_config, *EXPERTS).model
    figures = layer_metrics(sums, 4, model)
    assert figures["expert_load"].tolist() == [3.0, 1.0]
    assert (figures["expert_rounds"], figures["dropped"], figures["loss"]) == (3, 0.25, 1.0)
    assert layer_metrics({"loss": 1.0}, 4, small_config.model) == {"loss": 1.0}


@pytest.mark.slow
def test_a_run_goes_on_with_its_bias_on_another_mesh(small_config, corpus, tmp_path, capsys):
    """And logs, draws and evaluates as it would have on the first."""
    config = override(
        small_config,
        *(*EXPERTS, f"run.dir={tmp_path}", "mesh.data=1", "mesh.expert=2", "train.steps=4"),
        *("data.source=text", f"data.paths=[{corpus}/*.txt]", "data.holdout=0.2"),
        *(f"data.store={tmp_path}/store", "optimizer.name=sgd", "checkpoint.every=2"),
        *("optimizer.schedule=constant", "optimizer.lr=0.1", "train.eval_every=2"),
    )
    whole = train(override(config, "run.name=whole"))
    printed = capsys.readouterr().out
    assert "metrics.jsonl, loss.png and experts.png are in" in printed
    assert (whole.folder / "experts.png").read_bytes().startswith(b"\x89PNG")

    shutil.copytree(whole.folder, tmp_path / "two")
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "4")
    elsewhere = "mesh.fsdp=1", "mesh.context=2", "layout.experts=[expert,context]"
    two = train(override(config, "run.name=two", "checkpoint.resume=must", *elsewhere))
    assert "resumed     after 2 of 4 updates" in capsys.readouterr().out
    np.testing.assert_array_equal(two.state.buffers["moe"], whole.state.buffers["moe"])
    assert len(np.unique(whole.state.buffers["moe"])) > 2
    for line, expected in zip(two.history, whole.history, strict=True):
        assert line["step"] == expected["step"]
        for name in {"loss", "eval_loss", "router_aux_loss", "expert_load"} & expected.keys():
            np.testing.assert_allclose(line[name], expected[name], rtol=1e-5, err_msg=name)
