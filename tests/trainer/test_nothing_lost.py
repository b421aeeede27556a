"""A run that is stopped, killed or moved is the run that was not: cases C01, C03, C04, C05, C07."""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from meshwright.models.position import position_number, position_words
from meshwright.trainer import loop, start
from meshwright.trainer.checkpoint.manifest import DamagedError, find_checkpoints
from meshwright.trainer.checkpoint.restore import restore
from meshwright.trainer.config import Config
from meshwright.trainer.config.load import load, override
from meshwright.trainer.loop import train
from meshwright.trainer.runtime.stop import Stopped
from meshwright.trainer.state import abstract_state, lay_out, sharded_shapes, state_shardings

STEPS = 12
TIMES = ("step_time", "tokens_per_second", "mfu")


@pytest.fixture(scope="module")
def base(run, tmp_path_factory) -> Config:
    """Compiled once: the cache holds the programs of the runs after the first."""
    return override(
        run.config,
        f"run.dir={tmp_path_factory.mktemp('runs')}",
        f"device.compile_cache={tmp_path_factory.mktemp('xla')}",
        *(f"train.steps={STEPS}", "train.eval_every=5", "train.microbatches=4"),
        *("checkpoint.every=7", "checkpoint.keep=9", "optimizer.schedule=cosine"),
    )


@pytest.fixture(scope="module")
def unbroken(base):
    return train(override(base, "run.name=unbroken"))


def killed_after(unbroken, step: int, config: Config) -> Config:
    """A run folder as kill -9 leaves it: checkpoints up to `step`, metrics from further on, and
    half a line."""
    folder = Path(config.run.dir, config.run.name)
    shutil.copytree(unbroken.folder, folder)
    for at, checkpoint in find_checkpoints(folder).items():
        if at > step:
            shutil.rmtree(checkpoint)
    (folder / "checkpoints" / "11.orbax-checkpoint-tmp").mkdir()
    (folder / "loss.png").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-3]) + lines[-3][:20])
    return override(config, "checkpoint.resume=auto")


def numbers(result) -> list[dict]:
    """The history without what a clock measured."""
    return [
        {name: value for name, value in line.items() if name not in TIMES}
        for line in result.history
    ]


def assert_same_run(result, unbroken):
    """Bitwise: every logged number, and every leaf of the state."""
    assert numbers(result) == numbers(unbroken)
    leaves = zip(jax.tree.leaves(result.state), jax.tree.leaves(unbroken.state), strict=True)
    for ours, theirs in leaves:
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
    assert (result.folder / "loss.png").is_file()
    assert list(find_checkpoints(result.folder)) == list(find_checkpoints(unbroken.folder))


def test_a_checkpoints_label_is_the_number_of_completed_updates(base, unbroken):
    """Case C04. And what follows from there is bitwise what followed at first, rates included."""
    assert list(find_checkpoints(unbroken.folder)) == [7, 12]
    layout = lay_out(base)
    _, state = restore(unbroken.folder / "checkpoints" / "7", sharded_shapes(base, layout))
    assert (state.step.item(), position_number(state.position)) == (7, 7 * 16)
    config = killed_after(unbroken, 7, override(base, "run.name=c04"))
    assert_same_run(train(config), unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 1, 8])
def test_what_was_only_prefetched_is_not_skipped(base, unbroken, prefetch):
    """Case C07."""
    named = override(base, f"run.name=c07-{prefetch}", f"data.prefetch={prefetch}")
    assert_same_run(train(killed_after(unbroken, 7, named)), unbroken)


@pytest.mark.parametrize("edge", [2**31, 2**32])
def test_a_data_position_that_outgrows_a_word(edge, base, monkeypatch):
    """Rows, masks and metrics.jsonl go on, and so does a resume on either side of the edge."""
    config = override(
        base,
        *("train.dropout=0.1", "checkpoint.every=3", "train.eval_every=0", "train.steps=9"),
        f"run.name=from-{edge}",
    )
    rows, first = config.train.batch_size, edge - 4 * config.train.batch_size - 5
    begin_state = start.init_state

    def long_after(*arguments):
        state = begin_state(*arguments)
        words = jax.device_put(position_words(first), state.position.sharding)
        return replace(state, position=words)

    monkeypatch.setattr(start, "init_state", long_after)
    whole = train(config)
    positions = [line["position"] for line in whole.history if "position" in line]
    assert positions == [first + rows * update for update in range(1, 10)]
    assert positions[2] < edge < positions[5]  # checkpoints on both sides
    assert position_number(whole.state.position) == positions[-1]
    monkeypatch.setattr(start, "init_state", None)  # what resumes begins nothing
    for step in (3, 6):
        named = override(config, f"run.name=from-{edge}-{step}")
        assert_same_run(train(killed_after(whole, step, named)), whole)


def test_a_run_killed_before_its_last_evaluation_makes_it(base, unbroken, capsys):
    config = killed_after(unbroken, 12, override(base, "run.name=unevaluated"))
    folder = Path(config.run.dir, "unevaluated")
    lines = (unbroken.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-1]))
    assert_same_run(train(config), unbroken)
    assert "compiling" not in capsys.readouterr().out


def test_a_finished_run_says_so_and_stays(base, unbroken, capsys):
    before = (unbroken.folder / "metrics.jsonl").read_bytes()
    result = train(override(base, "run.name=unbroken", "checkpoint.resume=auto"))
    assert "resumed     after 12 of 12 updates, that is all of them" in capsys.readouterr().out
    assert (unbroken.folder / "metrics.jsonl").read_bytes() == before
    assert_same_run(result, unbroken)
    with pytest.raises(ValueError, match=r"train\.steps=9: .*unbroken has made 12 updates already"):
        train(override(base, "run.name=unbroken", "checkpoint.resume=auto", "train.steps=9"))


def on_devices(monkeypatch, config: Config, *mesh: str) -> Config:
    """The config on another mesh, of the first of the eight devices."""
    config = override(config, "device.cpu_devices=null", "mesh.data=1", "mesh.fsdp=1",
                      "mesh.tensor=1", *mesh)  # fmt: skip
    devices = jax.devices("cpu")[: math.prod(config.mesh.sizes().values())]
    monkeypatch.setattr(jax, "devices", lambda *backend: devices)
    return config


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        ("mesh.fsdp=4",),
        (),
        ("mesh.fsdp=2", "mesh.tensor=4"),
        ("mesh.data=4", "layout.zero=1"),
        ("mesh.pipe=2", "mesh.fsdp=2", "mesh.tensor=2"),
    ],
)
def test_a_run_goes_on_on_any_mesh(base, unbroken, monkeypatch, mesh):
    """Case C01. Written on data=2 · fsdp=2 · tensor=2."""
    name = "-".join(("c01", *mesh)).replace("mesh.", "").replace("layout.", "").replace("=", "")
    config = killed_after(unbroken, 7, override(base, f"run.name={name}"))
    config = on_devices(monkeypatch, config, *mesh)
    result = train(config)
    for ours, theirs in zip(numbers(result), numbers(unbroken), strict=True):
        for key in ("step", "position", "tokens", "lr", "eval_targets"):
            assert ours.get(key) == theirs.get(key)
        for key in ("loss", "eval_loss"):
            if key in theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-5)
    expected = state_shardings(abstract_state(config), lay_out(config))
    leaves = jax.tree.leaves(result.state), jax.tree.leaves(unbroken.state)
    for ours, theirs, sharding in zip(*leaves, jax.tree.leaves(expected), strict=True):
        assert ours.sharding.is_equivalent_to(sharding, ours.ndim)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())


def test_init_from_takes_the_parameters_and_nothing_else(base, unbroken, capsys):
    """Case C05."""
    source = unbroken.folder / "checkpoints" / "7"
    config = override(
        base,
        *("run.name=c05", f"checkpoint.init_from={source}", "train.steps=2", "train.eval_every=0"),
        *("model.rope_theta=20000.0", "optimizer.warmup=0"),
    )
    result = train(config)
    printed = capsys.readouterr().out
    assert f"parameters  of step 7 of {source}" in printed
    assert "changed     model.rope_theta=10000.0, now 20000.0" in printed
    first, *_ = (line for line in result.history if "loss" in line)
    assert (first["step"], first["position"]) == (1, 16)
    middle = (1 + 0.1) / 2  # of the cosine: update 1 of 2, as if there had been no 7 before
    assert first["lr"] == pytest.approx(config.optimizer.lr * middle)
    at_7 = unbroken.history[7]["loss"]
    assert first["loss"] < (at_7 + unbroken.history[0]["loss"]) / 2


def test_init_from_another_model_is_refused_by_leaf(base, unbroken):
    config = override(base, "run.name=refused", f"checkpoint.init_from={unbroken.folder}")
    with pytest.raises(
        ValueError, match=r"params\.layers\.swiglu\.up has shape \[2, 16, 24\], this"
    ):
        train(override(config, "model.d_ff=32"))
    with pytest.raises(ValueError, match="nowhere/checkpoints holds no finished checkpoint"):
        train(override(config, "checkpoint.init_from=nowhere"))
    assert not Path(config.run.dir, "refused").exists()


def test_a_damaged_checkpoint_stops_a_resume_unless_an_older_may_do(base, unbroken, capsys):
    config = killed_after(unbroken, 12, override(base, "run.name=damaged"))
    folder = Path(config.run.dir, "damaged")
    (folder / "checkpoints" / "12" / "manifest" / "metadata").write_text("{}")
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(DamagedError, match="fallback=true goes back to an older one, like step 7"):
        train(config)
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert_same_run(train(override(config, "checkpoint.fallback=true")), unbroken)
    assert f"12, now in {folder / 'damaged'}" in capsys.readouterr().out


def test_changes_are_listed_and_written(base, unbroken, capsys):
    config = killed_after(unbroken, 7, override(base, "run.name=changed"))
    config = override(config, "train.steps=8", "train.eval_every=0", "log.every=1")
    result = train(config)
    printed = capsys.readouterr().out
    assert "changed     train.steps=12, now 8" in printed
    assert "changed     log.every=4, now 1" in printed
    assert load(result.folder / "config.yaml") == config
    with pytest.raises(ValueError, match=r"model\.window=null, now 3; that cannot change"):
        train(override(config, "model.window=3"))


# C03: a signal at any moment


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def during_compile(monkeypatch, number):
    original = loop.in_background

    def in_background(work):
        send(number)
        time.sleep(0.2)  # the signal's thread needs a moment
        return original(lambda: (time.sleep(1), work())[1])

    monkeypatch.setattr(loop, "in_background", in_background)
    return 0


def during_data_wait(monkeypatch, number):
    original = loop.batch_at

    def batch_at(rows, position, **settings):
        if position == 3 * 16:
            send(number)
            time.sleep(3)
        return original(rows, position, **settings)

    monkeypatch.setattr(loop, "batch_at", batch_at)
    return 3


def during_evaluation(monkeypatch, number):
    original = loop.heldout_batches

    def heldout_batches(*arguments):
        for i, batch in enumerate(original(*arguments)):
            yield batch
            if i == 0:
                send(number)
                time.sleep(0.2)

    monkeypatch.setattr(loop, "heldout_batches", heldout_batches)
    return 5


def during_save(monkeypatch, number):
    original = loop.save

    def save(run, state, done):
        original(run, state, done)
        monkeypatch.setattr(loop, "save", original)  # the next one is the stop's own
        send(number)
        time.sleep(0.2)

    monkeypatch.setattr(loop, "save", save)
    return 7


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        (during_compile, signal.SIGTERM),
        (during_data_wait, signal.SIGINT),
        pytest.param(during_evaluation, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(during_save, signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_signal_at_any_moment_leaves_one_committed_checkpoint(
    base, unbroken, monkeypatch, moment, number
):
    """Case C03."""
    config = override(base, f"run.name=c03-{moment.__name__}", "data.prefetch=0")
    folder = Path(config.run.dir, config.run.name)
    with monkeypatch.context() as patched:
        step = moment(patched, number)
        started = time.monotonic()
        with pytest.raises(Stopped, match=rf"^stopped: step {step} is saved in {folder}; "):
            train(config)
        assert time.monotonic() - started < config.checkpoint.grace
    assert list(find_checkpoints(folder)) == [step]
    result = train(override(config, "checkpoint.resume=must"))
    assert numbers(result) == numbers(unbroken)
    for ours, theirs in zip(
        jax.tree.leaves(result.state), jax.tree.leaves(unbroken.state), strict=True
    ):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
