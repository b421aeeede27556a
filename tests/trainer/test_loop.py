"""The loop's order, its stops, its folder, and one whole run from config to picture."""

from __future__ import annotations

import json
import re
import shutil

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.models.position import position_number
from meshwright.trainer import loop
from meshwright.trainer.checkpoint.manifest import find_checkpoints
from meshwright.trainer.cli import main
from meshwright.trainer.config.load import load, override, to_yaml
from meshwright.trainer.loop import RunError, is_due, next_stop, run_steps, train
from meshwright.trainer.optim.learning_rate import learning_rate
from meshwright.trainer.runtime.stop import Stopped

STEP_KEYS = {
    *("step", "position", "loss", "grad_norm", "lr", "tokens"),
    *("step_time", "tokens_per_second", "mfu", "skipped", "loss_scale"),
}


def read_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def events(monkeypatch):
    """What a fake step and a patched `jax.device_get` did, in order."""
    made = []

    def fetch(metrics):
        made.append(f"fetch {metrics['step']}")
        return metrics

    monkeypatch.setattr(jax, "device_get", fetch)
    return made


def run_fake_steps(events, count: int):
    def step(state, batch):
        events.append(f"dispatch {batch}")
        return state + 1, {"step": batch}

    def record(metrics, seconds):
        assert seconds >= 0
        events.append(f"record {metrics['step']}")

    return run_steps(step, 0, range(1, count + 1), record)


def test_metrics_are_fetched_after_the_next_step_is_dispatched(events):
    assert run_fake_steps(events, 4) == (4, False)
    assert events == [
        *("dispatch 1", "dispatch 2", "fetch 1", "record 1"),
        *("dispatch 3", "fetch 2", "record 2"),
        *("dispatch 4", "fetch 3", "record 3"),
        *("fetch 4", "record 4"),
    ]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_every_step_is_recorded_once_in_order(events, count):
    assert run_fake_steps(events, count) == (count, False)
    steps = range(1, count + 1)
    assert [e for e in events if e.startswith("record")] == [f"record {i}" for i in steps]


def test_the_seconds_of_all_steps_are_those_of_the_loop(events, monkeypatch):
    clock = iter([100.0, 101.0, 103.0, 106.0])
    monkeypatch.setattr(loop.time, "perf_counter", lambda: next(clock))
    seconds = []
    run_steps(
        lambda state, batch: (state, {"step": batch}),
        None,
        [1, 2, 3],
        lambda metrics, value: seconds.append(value),
    )
    assert seconds == [1.0, 2.0, 3.0]


def test_a_stop_ends_after_what_was_dispatched_is_recorded(events):
    def batches():
        yield from (1, 2, 3)
        raise Stopped

    def step(state, batch):
        events.append(f"dispatch {batch}")
        return state + 1, {"step": batch}

    ended = run_steps(step, 0, batches(), lambda m, _: events.append(f"record {m['step']}"))
    assert ended == (3, True)
    assert events[-4:] == ["fetch 2", "record 2", "fetch 3", "record 3"]


PERIODS = st.lists(st.integers(0, 12), min_size=2, max_size=2)


@given(st.integers(1, 60), PERIODS)
def test_the_loop_stops_wherever_something_is_due_and_nowhere_else(steps, periods):
    done, stops = 0, []
    while done < steps:
        done = next_stop(done, steps, *periods)
        stops.append(done)
    due = [i for i in range(1, steps) if any(is_due(i, every) for every in periods)]
    assert stops == [*due, steps]


@given(st.integers(0, 100), st.integers(0, 100))
def test_something_is_due_after_every_multiple_of_its_period(step, every):
    assert is_due(step, every) == (every > 0 and step in range(every, step + 1, every))


def test_the_run_folder_holds_what_was_promised(run):
    names = {path.name for path in run.folder.iterdir()}
    files = {"config.yaml", "data.json", "tokenizer.json", "metrics.jsonl", "loss.png"}
    assert names == files | {"checkpoints", ".lock"}
    assert load(run.folder / "config.yaml") == run.config
    assert (run.folder / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_result_is_what_lies_on_disk(run):
    result = run.result
    assert result.history == read_lines(run.folder / "metrics.jsonl")
    assert (result.config, result.folder) == (run.config, run.folder)
    assert (result.state.step.item(), position_number(result.state.position)) == (6, 6 * 16)
    assert set(result.levels) == {"unigram counts", "bigram counts"}
    (axes,) = result.plot().axes
    assert {line.get_label() for line in axes.lines} == {
        *("training batch", "held out", "unigram counts", "bigram counts")
    }


def test_each_update_has_one_line_with_every_key(run):
    steps = [line for line in run.result.history if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["position"] for line in steps] == [16 * i for i in range(1, 7)]
    for line in steps:
        assert set(line) == STEP_KEYS
        assert isinstance(line["tokens"], int)
        assert 0 < line["tokens"] <= 16 * 16
        assert line["step_time"] > 0
        assert line["tokens_per_second"] == line["tokens"] / line["step_time"]
        assert line["mfu"] is None


def test_floats_are_written_in_full(run):
    """Each is exactly the float32 of the device: nothing was rounded for people."""
    for line in run.result.history:
        for key in ("loss", "grad_norm", "lr"):
            if key in line:
                assert np.float32(line[key]).item() == line[key]
                assert len(str(line[key])) > 6 or key == "lr"


def test_the_logged_rate_is_that_of_the_completed_updates_before(run):
    schedule = learning_rate(run.config.optimizer, run.config.train)
    for line in run.result.history:
        if "lr" in line:
            assert line["lr"] == pytest.approx(float(schedule(line["step"] - 1)), rel=1e-6)


def test_evaluations_and_checkpoints_come_when_due(run):
    evaluations = [line for line in run.result.history if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [2, 4, 6]
    assert {tuple(line) for line in evaluations} == {("step", "eval_loss", "eval_targets")}
    assert len({line["eval_targets"] for line in evaluations}) == 1
    losses = [line["eval_loss"] for line in evaluations]
    assert losses == sorted(losses, reverse=True)
    assert list(find_checkpoints(run.folder)) == [3, 6]


def test_lines_are_in_the_order_of_events(run):
    order = [(line["step"], "eval_loss" in line) for line in run.result.history]
    assert order == sorted(order)


def test_a_run_is_told_as_it_goes(run):
    lines = run.printed.getvalue().splitlines()
    starts = ["mesh ", "parameters ", "at rest ", "dtypes ", "per update ", "decayed "]
    starts += ["replicated ", "run "]
    for line, start in zip(lines, starts, strict=False):
        assert line.startswith(start)
    assert lines[8] == "compiling   the step"
    assert [line[:7] for line in lines[9:-1]] == ["step 2:", "step 4 ", "step 4:", "step 6:"]
    loss = run.result.history[-1]["eval_loss"]
    assert f"step 6: held-out loss {loss:.4f} nats per token over" in lines[-2]
    assert "unigram counts of the training split" in lines[-2]
    assert lines[-1] == f"done: checkpoint, metrics.jsonl and loss.png are in {run.folder}"


def test_nothing_that_decorates_a_run_ends_it(run, tmp_path, monkeypatch, capsys):
    """A picture that cannot be written, a sample that fails; the run has 6 of 7 updates."""
    shutil.copytree(run.folder, tmp_path / "eight")
    (tmp_path / "eight" / "loss.png").unlink()
    (tmp_path / "eight" / "loss.png").mkdir()

    def fail(*arguments, **settings):
        raise UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed")

    monkeypatch.setattr(loop, "generate_texts", fail)
    more = "checkpoint.resume=auto", "train.steps=7", "log.sample=a", f"run.dir={tmp_path}"
    result = train(override(run.config, *more))
    assert result.history[-1]["step"] == 7
    *_, sample, picture, done = capsys.readouterr().out.splitlines()
    assert sample.startswith("note        no sample: UnicodeEncodeError: 'utf-8' codec can't")
    assert picture.startswith("note        no loss.png: IsADirectoryError: [Errno 21]")
    assert done == f"done: checkpoint and metrics.jsonl are in {result.folder}"


def test_a_mesh_writes_the_lines_of_one_device(run, tmp_path, monkeypatch, capsys):
    """C32: what is logged, not only what is learned, is the same in every layout."""
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *backend: devices)
    config = override(
        run.config,
        *("mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1", "device.cpu_devices=null"),
        *(f"run.dir={tmp_path}", "run.name=one", "train.microbatches=4"),
        *("train.eval_every=0", "checkpoint.every=0"),
    )
    written = tmp_path / "one.yaml"
    written.write_text(to_yaml(config), encoding="utf-8")

    assert main(["train", str(written)]) == 0

    assert "mesh        one device" in capsys.readouterr().out
    steps, evaluations = [], []
    for line in read_lines(tmp_path / "one" / "metrics.jsonl"):
        (evaluations if "eval_loss" in line else steps).append(line)
    expected = [line for line in run.result.history if "loss" in line]
    for ours, theirs in zip(steps, expected, strict=True):
        for key in ("step", "position", "tokens", "lr"):
            assert ours[key] == theirs[key]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert [line["step"] for line in evaluations] == [6]
    assert evaluations[0]["eval_loss"] == pytest.approx(
        run.result.history[-1]["eval_loss"], rel=1e-5
    )
    assert list(find_checkpoints(tmp_path / "one")) == [6]


def test_without_documents_held_out_nothing_is_evaluated(run, tmp_path, capsys):
    """And the cell of a notebook may run again."""
    config = override(
        run.config,
        *("data.holdout=0", "train.eval_every=0", f"data.store={tmp_path}/store"),
        *(f"run.dir={tmp_path}", "run.name=auto", "train.steps=2"),
    )
    for name in ("run-1", "run-2"):
        result = train(config)
        assert result.folder == tmp_path / name
        assert result.config.run.name == name
        assert load(result.folder / "config.yaml").run.name == name
    assert [line["step"] for line in result.history] == [1, 2]
    assert "held-out" not in capsys.readouterr().out
    assert main(["eval", str(result.folder)]) == 2
    assert "holds no documents out (data.holdout=0); write" in capsys.readouterr().err
    with pytest.raises(
        ValueError, match=r"data\.holdout=0 leaves nothing that train\.eval_every=2"
    ):
        override(config, "train.eval_every=2")


def attempts(folder) -> list[dict]:
    return [line for line in read_lines(folder / "metrics.jsonl") if "position" in line]


def diverging(run, tmp_path, *overrides):
    return override(
        run.config,
        *(f"run.dir={tmp_path}", "optimizer.lr=1e30", "optimizer.warmup=0", "run.name=high"),
        *("train.eval_every=0", "checkpoint.every=0", *overrides),
    )


def test_too_many_attempts_in_a_row_that_are_not_finite_end_the_run(run, tmp_path):
    config = diverging(run, tmp_path, "train.max_skipped=2")
    message = r"step (\d): .* 3 attempts in a row, train\.max_skipped=2; lower optimizer\.lr=1e\+30"
    with pytest.raises(RunError, match=message) as caught:
        train(config)
    lines = attempts(tmp_path / "high")
    failed = int(re.search(message, str(caught.value))[1])
    assert [line["step"] for line in lines] == [*range(1, failed), *[failed - 1] * 3]
    assert [line["skipped"] for line in lines[-4:]] == [0, 1, 2, 3]
    rows = config.train.batch_size
    assert [line["position"] for line in lines] == [rows * i for i in range(1, len(lines) + 1)]
    assert all(None in (line["loss"], line["grad_norm"]) for line in lines[-3:])
    assert all(line["loss_scale"] is None for line in lines)


def test_halt_on_nan_names_parameters_and_microbatches(run, tmp_path):
    config = diverging(run, tmp_path, "train.halt_on_nan=true")
    message = (
        r"step \d: .*; not finite in micro-batch 1, 2 of 2: the gradient of .*swiglu\.down.*; "
        r"train\.halt_on_nan=true"
    )
    with pytest.raises(RunError, match=message):
        train(override(config, "train.microbatches=2"))
    assert [line["skipped"] for line in attempts(tmp_path / "high")][-2:] == [0, 1]


def test_f16_skips_until_the_scale_fits_and_resumes_bitwise(run, tmp_path):
    config = override(
        run.config,
        *(f"run.dir={tmp_path}", "precision.compute=f16", f"precision.first_scale={2.0**28}"),
        *("train.eval_every=0", "checkpoint.every=0", "checkpoint.resume=auto"),
        "optimizer.schedule=constant",
    )
    train(override(config, "run.name=whole"))
    whole = attempts(tmp_path / "whole")
    skipped = whole[-1]["skipped"]
    assert skipped > 3
    assert len(whole) == config.train.steps + skipped
    scales = [line["loss_scale"] for line in whole]
    assert scales[: skipped + 1] == [2.0 ** (28 - i) for i in range(skipped + 1)]
    assert {line["step"] for line in whole[:skipped]} == {0}
    assert whole[-1]["loss"] < whole[skipped]["loss"]

    for steps in (2, config.train.steps):
        train(override(config, "run.name=parts", f"train.steps={steps}"))
    parts = attempts(tmp_path / "parts")
    timed = {"step_time", "tokens_per_second", "mfu"}
    assert [{k: v for k, v in line.items() if k not in timed} for line in parts] == [
        {k: v for k, v in line.items() if k not in timed} for line in whole
    ]


def test_a_scale_at_its_floor_ends_the_run(run, tmp_path):
    config = diverging(run, tmp_path, "precision.compute=f16", "precision.first_scale=2")
    message = r"step \d: .* loss scale 1; no loss scale is lower; lower optimizer\.lr=1e\+30"
    with pytest.raises(RunError, match=message):
        train(config)
    assert [line["loss_scale"] for line in attempts(tmp_path / "high")][-2:] == [2.0, 1.0]


def test_f16_has_its_own_way_to_halt(run):
    with pytest.raises(ValueError, match="halt_on_nan=true would end the run at an ordinary over"):
        override(run.config, "precision.compute=f16", "train.halt_on_nan=true")


def test_a_checkpoint_is_safe_before_the_evaluation_that_may_fail(run, tmp_path, monkeypatch):
    def evaluate(*arguments):
        raise MemoryError("of the evaluation")

    monkeypatch.setattr(loop, "evaluate", evaluate)
    config = override(run.config, f"run.dir={tmp_path}", "train.eval_every=0", "checkpoint.every=0")
    with pytest.raises(MemoryError, match="of the evaluation"):
        train(config)
    assert list(find_checkpoints(tmp_path / "eight")) == [6]
