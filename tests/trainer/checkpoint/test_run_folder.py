"""Where a run begins: every state of its folder × checkpoint.resume, and which keys may change."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.trainer.checkpoint.manifest import config_of, find_checkpoints, run_of
from meshwright.trainer.checkpoint.run_folder import (
    as_one_process,
    check_data,
    compare,
    hold,
    named,
    read_trained_on,
    resumes_from,
    run_folder,
    write_run_files,
)
from meshwright.trainer.config import Config, RunConfig
from meshwright.trainer.config.load import load, override, to_yaml
from meshwright.trainer.data.tokenizer import ByteTokenizer

DOCUMENTS = {"data.source": "stdlib", "fingerprint": "abc"}
STORE: Any = SimpleNamespace(
    path=Path("/somewhere/store"),
    tokenizer=ByteTokenizer(),
    description=SimpleNamespace(made_from=DOCUMENTS | {"data.tokenizer": "byte"}),
)


def config_in(path, *overrides: str) -> Config:
    return override(Config(run=RunConfig(dir=str(path), name="run")), *overrides)


def resuming(path, resume: str) -> Config:
    return config_in(path, f"checkpoint.resume={resume}")


def folder_with(path, *, config: Config | None, steps: tuple[int, ...] = ()) -> Path:
    folder = path / "run"
    folder.mkdir()
    if config is not None:
        (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    for step in steps:
        (folder / "checkpoints" / str(step)).mkdir(parents=True)
    return folder


def test_an_automatic_name_is_the_first_that_is_free(tmp_path):
    config = config_in(tmp_path, "run.name=auto")
    assert named(config).run.name == "run-1"
    (tmp_path / "run-1").mkdir()
    (tmp_path / "run-2").write_text("")
    assert named(config) == config_in(tmp_path, "run.name=run-3")
    assert named(config_in(tmp_path)) == config_in(tmp_path)
    with pytest.raises(
        ValueError, match=r"run\.name=auto begins a new run each time, which .*=must"
    ):
        config_in(tmp_path, "run.name=auto", "checkpoint.resume=must")


@pytest.mark.parametrize(
    "place", ["checkpoints/run", "runs/checkpoints", "checkpoints/checkpoints"]
)
def test_a_run_may_be_called_checkpoints_or_lie_in_such_a_folder(tmp_path, place):
    folder = tmp_path / place
    config = override(Config(run=RunConfig(dir=str(folder.parent), name=folder.name)))
    for step in ("3", "6"):
        (folder / "checkpoints" / step / "state").mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    checkpoints = {step: folder / "checkpoints" / str(step) for step in (3, 6)}
    assert find_checkpoints(folder) == find_checkpoints(folder / "checkpoints") == checkpoints
    for path in (folder, folder / "checkpoints", *checkpoints.values()):
        assert run_of(path) == folder
        assert config_of(path) == config
    assert find_checkpoints(checkpoints[3]) == {3: checkpoints[3]}
    assert resumes_from(folder, override(config, "checkpoint.resume=auto")) == (True, [])


def test_a_folder_that_looks_like_a_url_is_resumed_as_the_message_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Config(run=RunConfig(dir="./gs:/bucket", name="run"))
    folder = run_folder(config)
    (folder / "checkpoints" / "3").mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert resumes_from(folder, override(config, "checkpoint.resume=auto")) == (True, [])


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_where_there_is_no_folder_a_run_is_new(tmp_path, resume):
    assert resumes_from(tmp_path / "run", resuming(tmp_path, resume)) == (False, [])
    assert not (tmp_path / "run").exists()


def test_what_must_resume_does_not_start(tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint\.resume=must: .*/run does not exist"):
        resumes_from(tmp_path / "run", resuming(tmp_path, "must"))
    folder = folder_with(tmp_path, config=config_in(tmp_path))
    with pytest.raises(ValueError, match="holds no finished checkpoint"):
        resumes_from(folder, resuming(tmp_path, "must"))


def test_a_run_folder_is_not_used_twice_unasked(tmp_path):
    folder = folder_with(tmp_path, config=config_in(tmp_path), steps=(4,))
    with pytest.raises(ValueError) as caught:
        resumes_from(folder, config_in(tmp_path))
    assert str(caught.value) == (
        f"{folder} exists already; write run.name=… for a new run (run.name=auto takes the next "
        "free name), or checkpoint.resume=auto to go on with this one"
    )


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_a_run_with_a_checkpoint_goes_on(tmp_path, resume):
    folder = folder_with(tmp_path, config=config_in(tmp_path), steps=(4, 10))
    assert resumes_from(folder, resuming(tmp_path, resume)) == (True, [])


@pytest.mark.parametrize("made", ["lock", "half a config", "config", "unfinished checkpoint"])
def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path, made):
    written = config_in(tmp_path) if made in ("config", "unfinished checkpoint") else None
    folder = folder_with(tmp_path, config=written)
    (folder / ".lock").touch()
    if made == "half a config":
        (folder / ".config.yaml.tmp").write_text("run:\n  na")
    if made == "unfinished checkpoint":
        (folder / "checkpoints" / "3.orbax-checkpoint-tmp").mkdir(parents=True)
    assert resumes_from(folder, resuming(tmp_path, "auto")) == (False, [])


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    folder = folder_with(tmp_path, config=None)
    (folder / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match=r"run is not a run folder: it holds no config\.yaml"):
        resumes_from(folder, resuming(tmp_path, "auto"))


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (["mesh.tensor=4", "mesh.data=2"], ["mesh.data=1, now 2", "mesh.tensor=1, now 4"]),
        (["mesh.dcn={data: 1}"], ["mesh.dcn.data=null, now 1"]),
        (["layout.zero=1"], ["layout.zero=3, now 1"]),
        (["train.steps=999"], ["train.steps=400, now 999"]),
        (["log.every=1", "launch.timeout=9"],
         ["log.every=10, now 1", "launch.timeout=300.0, now 9.0"]),
        (["optimizer.lr=1e-4"], ["optimizer.lr=0.001, now 0.0001"]),
        (["train.batch_size=64", "train.microbatches=2"],
         ["train.batch_size=32, now 64", "train.microbatches=1, now 2"]),
        (["data.prefetch=9"], ["data.prefetch=2, now 9"]),
        (["checkpoint.every=7", "checkpoint.resume=auto", "run.dir=elsewhere"], []),
    ],
)  # fmt: skip
def test_changes_that_are_listed(overrides, lines):
    before = override(Config(), "mesh.data=1")
    assert compare(before, override(before, *overrides)) == lines


@pytest.mark.parametrize(
    "changed",
    ["model.layers=5", "model.rope_theta=5", "data.holdout=0.5", "run.seed=1", "train.seq_len=64"],
)
def test_changes_that_are_refused(changed):
    before = Config()
    with pytest.raises(ValueError) as caught:
        compare(before, override(before, changed, "mesh.tensor=2"))
    assert changed.partition("=")[0] in str(caught.value)
    assert "mesh" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "run.name=…" in str(caught.value)


@pytest.mark.parametrize("changed", [("f16", "bf16"), ("f32", "f16")])
def test_a_change_to_or_from_f16_is_refused(changed):
    before, now = (override(Config(), f"precision.compute={dtype}") for dtype in changed)
    with pytest.raises(ValueError, match=r"precision.compute=\S+, now .*checkpoint.init_from=…"):
        compare(before, now)
    assert compare(override(Config(), "precision.compute=bf16"), Config()) == [
        "precision.compute=bf16, now f32"
    ]


def test_the_folder_is_made_with_its_config_its_tokenizer_and_what_its_documents_were(tmp_path):
    config = config_in(tmp_path / "not" / "yet")
    folder = run_folder(config)
    assert folder == tmp_path / "not" / "yet" / "run"
    with hold(folder, config):
        assert resumes_from(folder, config) == (False, [])
        write_run_files(folder, config, STORE)
    assert load(folder / "config.yaml") == config
    trained_on = read_trained_on(folder)
    assert (trained_on.documents, trained_on.store) == (DOCUMENTS, "/somewhere/store")
    assert (folder / "tokenizer.json").read_text() == ByteTokenizer.text
    names = sorted(path.name for path in folder.iterdir())
    assert names == [".lock", "config.yaml", "data.json", "tokenizer.json"]


def test_killed_between_its_files_a_run_starts_again(tmp_path, monkeypatch):
    config = resuming(tmp_path, "auto")
    monkeypatch.setattr(
        "meshwright.trainer.checkpoint.run_folder.json.dumps", lambda *a, **k: 1 / 0
    )
    with hold(tmp_path / "run", config), pytest.raises(ZeroDivisionError):
        write_run_files(tmp_path / "run", config, STORE)
    assert resumes_from(tmp_path / "run", config) == (False, [])


def test_other_documents_are_refused(tmp_path):
    with hold(tmp_path, config_in(tmp_path)):
        write_run_files(tmp_path, config_in(tmp_path), STORE)
    check_data(tmp_path, DOCUMENTS)
    with pytest.raises(ValueError, match="trained on other documents or settings"):
        check_data(tmp_path, DOCUMENTS | {"fingerprint": "x"})
    for damage in ("{", "[1]", '{"fingerprint": "x"}', "[" * 100_000, None):
        (tmp_path / "data.json").unlink(missing_ok=True)
        if damage:
            (tmp_path / "data.json").write_text(damage)
        with pytest.raises(ValueError, match=r"data\.json is missing or damaged"):
            check_data(tmp_path, DOCUMENTS)


def test_two_runs_never_share_a_folder(tmp_path):
    config = config_in(tmp_path)
    with (
        hold(tmp_path, config),
        pytest.raises(ValueError, match="is being trained already, by another process$"),
        hold(tmp_path, config),
    ):
        raise AssertionError
    with hold(tmp_path, config):
        pass


def test_a_run_of_several_processes_can_be_opened_by_one():
    several = override(
        Config(),
        *("launch.coordinator=a:1", "launch.process_id=1", "launch.process_count=2"),
        *("device.cpu_devices=4", "mesh.data=8"),
    )
    one = override(Config(), "device.cpu_devices=8", "mesh.data=8")
    assert as_one_process(several, 2) == one
    assert as_one_process(one, 1) == one
    assert as_one_process(Config(), 4) == Config()


def test_the_home_folder_may_be_written_short(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_folder(config_in("~/runs")) == tmp_path / "runs" / "run"


def test_a_run_folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    config = config_in(tmp_path / "file")
    with (
        pytest.raises(ValueError, match=r"run\.dir=.*/file: Not a directory: .*/file/run$"),
        hold(run_folder(config), config),
    ):
        raise AssertionError
    with pytest.raises(ValueError, match=r"file is a file; write another run\.name=…$"):
        resumes_from(tmp_path / "file", config)

    def refuse(*arguments, **keywords):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    config = config_in("/locked")
    with (
        pytest.raises(ValueError, match=r"run\.dir=/locked: Permission denied: /locked/run$"),
        hold(run_folder(config), config),
    ):
        raise AssertionError
