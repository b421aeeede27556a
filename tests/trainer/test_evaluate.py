"""The held-out loss is one number: for any batch size, any mesh, and for the plain model."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import partial

import jax
import numpy as np
import pytest

import reference
from meshwright.models.batch import Batch
from meshwright.trainer import cli
from meshwright.trainer.config.load import override
from meshwright.trainer.data.rows import row_count, rows_at
from meshwright.trainer.data.store import open_data
from meshwright.trainer.evaluate import (
    Evaluation,
    counting_levels,
    describe_evaluation,
    evaluate,
    evaluate_run,
    heldout_batches,
)
from meshwright.trainer.state import abstract_state, lay_out, state_shardings
from meshwright.trainer.step import make_eval_step


@pytest.fixture(scope="module")
def heldout(run):
    return open_data(run.config).heldout


@pytest.fixture(scope="module")
def at_end(run) -> Evaluation:
    """What the run itself found at its end, on data=2 · fsdp=2 · tensor=2, 16 rows a batch."""
    last = run.result.history[-1]
    return Evaluation(last["eval_loss"], last["eval_targets"])


def mesh(data=1, fsdp=1, tensor=1) -> tuple[str, ...]:
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    return "device.cpu_devices=null", *(f"mesh.{axis}={size}" for axis, size in sizes.items())


def evaluate_on(run, heldout, *overrides: str) -> Evaluation:
    config = override(run.config, *overrides)
    layout = lay_out(config, jax.devices()[: math.prod(config.mesh.sizes().values())])
    params = jax.device_get(run.result.state.params)
    params = jax.device_put(params, state_shardings(abstract_state(config), layout).params)
    return evaluate(
        make_eval_step(config, layout), params, heldout_batches(heldout, config, layout)
    )


@pytest.mark.parametrize(
    "overrides",
    [
        (*mesh(), "train.eval_batch_size=7"),
        (*mesh(), "train.eval_batch_size=1000"),
        (*mesh(data=3), "train.batch_size=3"),
        (*mesh(fsdp=2, tensor=2), "layout.zero=1", "layout.sequence_parallel=false"),
        (*mesh(tensor=2), "mesh.context=4", "layout.context=zigzag"),
    ],
)
def test_one_number_for_any_batch_size_and_mesh(run, heldout, at_end, overrides):
    result = evaluate_on(run, heldout, *overrides)
    assert result.targets == at_end.targets
    assert result.loss == pytest.approx(at_end.loss, rel=1e-6)


def test_it_is_the_loss_of_the_plain_model(run, heldout, at_end):
    rows = np.arange(row_count(heldout, 16, partial=True))
    batch = Batch(*(array[None] for array in rows_at(heldout, rows, 16)))
    params = jax.device_get(run.result.state.params)
    _, nll = jax.jit(partial(reference.loss, config=run.config))(params, batch)
    assert float(nll) == pytest.approx(at_end.loss, rel=1e-6)
    assert int(batch.weights.sum()) == at_end.targets


@pytest.mark.parametrize("size", [1, 7, 16, 64, 1000])
def test_every_held_out_target_counts_once(run, heldout, size):
    """A step that reports positions in the stream instead of losses shows what it was fed."""
    config = override(run.config, *mesh(), f"train.eval_batch_size={size}")
    layout = lay_out(config, jax.devices()[:1])
    seen, shapes = [], set()

    def eval_step(params, batch, router_bias):
        shapes.add(batch.tokens.shape)
        weights = np.asarray(batch.weights)
        seen.extend(np.asarray(batch.targets)[weights > 0])
        assert not weights[np.asarray(batch.segments) < 0].any()
        return np.float32(2 * weights.sum()), np.float32(weights.sum())

    result = evaluate(eval_step, None, heldout_batches(heldout, config, layout))
    stream, ends = np.asarray(heldout.tokens), np.asarray(heldout.offsets[1:]) - 1
    has_target = np.ones(len(stream), bool)
    has_target[ends] = False
    np.testing.assert_array_equal(seen, stream[1:][has_target[:-1]])
    assert result == Evaluation(2.0, int(has_target.sum()))
    assert shapes == {(1, size, 16)}


def test_a_run_evaluated_on_another_mesh_says_what_it_said(run, at_end):
    said = describe_evaluation(at_end, run.result.levels)
    assert evaluate_run(run.folder, (*mesh(fsdp=8), "train.eval_batch_size=24")) == said
    assert said in run.printed.getvalue()


def test_a_run_without_a_checkpoint(run, tmp_path):
    for name in ("config.yaml", "data.json"):
        (tmp_path / name).write_bytes((run.folder / name).read_bytes())
    with pytest.raises(ValueError, match="checkpoints holds no finished checkpoint"):
        evaluate_run(tmp_path)


def test_the_levels_are_those_of_the_training_split(run):
    train = open_data(run.config).train
    stream = np.asarray(train.tokens, np.int64)
    share = np.bincount(stream) / len(stream)
    unigram = -sum(p * math.log(p) for p in share if p)
    levels = counting_levels(open_data(run.config))
    assert levels == run.result.levels
    assert levels["unigram counts"] == pytest.approx(unigram)
    assert 0 < levels["bigram counts"] < levels["unigram counts"]


def test_the_sentence():
    assert describe_evaluation(Evaluation(1.23456, 1234567), {}) == (
        "held-out loss 1.2346 nats per token over 1,234,567 targets"
    )
    assert describe_evaluation(Evaluation(1.0, 5), {"a": 2.0, "b": 1.5}) == (
        "held-out loss 1.0000 nats per token over 5 targets "
        "(a of the training split 2.0000; b of the training split 1.5000)"
    )


def test_eval_of_another_model_is_one_line(run, capfd):
    words = ["model.d_ff=40", "device.cpu_devices=8"]
    assert cli.main(["eval", str(run.folder), *words]) == 2
    assert capfd.readouterr().err.count("\n") == 1


def test_eval_prints_no_warnings(run):
    code = f"from meshwright.trainer.cli import main; main(['eval', {str(run.folder)!r}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
