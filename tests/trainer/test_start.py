"""Where a run begins: at its own checkpoint, with other keys or on another mesh; or not at all."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from meshwright.trainer.config import RunConfig
from meshwright.trainer.config.load import override
from meshwright.trainer.loop import train

EXPERTS = ("model.moe.experts=4", "model.moe.bias_update_rate=0.1")


def attempts(folder) -> list[dict]:
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [line for line in map(json.loads, text.splitlines()) if "position" in line]


def test_a_finished_run_that_is_extended_says_what_becomes_of_its_rate(run, tmp_path, capsys):
    config = override(
        run.config,
        *(f"run.dir={tmp_path}", "run.name=long", "optimizer.warmup=0", "train.steps=2"),
        *("train.eval_every=0", "checkpoint.every=0", "checkpoint.resume=auto"),
        "run.seed=4294967295",
    )
    train(config)
    assert "\nrate " not in capsys.readouterr().out
    train(override(config, "train.steps=4"))
    (line,) = re.findall(r"^rate +(.*)$", capsys.readouterr().out, re.MULTILINE)
    assert line == (
        "the rate of update 3 is 0.0232, that of update 2 was 0.01: train.steps=4 stretches "
        "optimizer.schedule=cosine; optimizer.schedule=constant optimizer.lr=0.01 goes on at the "
        "last rate"
    )
    rates = [line["lr"] for line in attempts(tmp_path / "long")]
    assert rates == pytest.approx([0.055, 0.01, 0.0231802, 0.01], rel=1e-5)

    train(override(config, "train.steps=5", "optimizer.schedule=constant", "optimizer.lr=0.01"))
    assert "\nrate " not in capsys.readouterr().out
    assert attempts(tmp_path / "long")[-1]["lr"] == pytest.approx(0.01, rel=1e-6)


def test_mistakes_leave_no_run_folder(run, tmp_path):
    config = replace(run.config, run=RunConfig(dir=str(tmp_path), name="none"))
    wrong = override(config, "data.paths=[/nope]", "data.store=null")
    with pytest.raises(ValueError, match="matches no file"):
        train(wrong)
    assert not list(tmp_path.iterdir())


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
