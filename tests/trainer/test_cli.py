"""The command line: what each command calls, exit codes, one line for the user's mistakes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from meshwright.trainer.cli import main
from meshwright.trainer.config.load import load, override, schema, to_yaml


@pytest.fixture
def calls(monkeypatch):
    """Everything the commands call, in order; no JAX is started. A test may change the answers."""
    made = SimpleNamespace(list=[], verify=True)

    def record(module: str, name: str, answer):
        def call(*arguments):
            made.list.append((name, *arguments))
            return answer(*arguments)

        monkeypatch.setitem(sys.modules, f"meshwright.{module}", SimpleNamespace(**{name: call}))

    record("trainer.runtime.devices", "prepare_devices", lambda device: None)
    record("trainer.loop", "train", lambda config: None)
    record("trainer.evaluate", "evaluate_run", lambda run, overrides: "eval_loss 1.5")
    record("trainer.inspect.verify", "verify", lambda config, layouts: made.verify)
    return made


def test_train_prepares_devices_first(calls):
    assert main(["train", "tiny", "mesh.fsdp=1", "mesh.data=4"]) == 0
    config = load("tiny", "mesh.fsdp=1", "mesh.data=4")
    assert calls.list == [("prepare_devices", config), ("train", config)]


def test_eval_takes_the_config_of_the_run(calls, tmp_path, capsys):
    config = load("tiny", "device.cpu_devices=4", "mesh.data=-1")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert main(["eval", str(tmp_path), "mesh.data=1"]) == 0
    assert calls.list == [
        ("prepare_devices", override(config, "mesh.data=1")),
        ("evaluate_run", str(tmp_path), ("mesh.data=1",)),
    ]
    assert capsys.readouterr().out == "eval_loss 1.5\n"


def test_eval_of_a_folder_that_is_no_run(calls, tmp_path, capsys):
    assert main(["eval", str(tmp_path)]) == 2
    assert "config.yaml does not exist; RUN is a folder that" in capsys.readouterr().err
    assert calls.list == []


def test_verify_exits_1_on_a_mismatch(calls):
    assert main(["verify", "tiny"]) == 0
    calls.verify = False
    assert main(["verify", "tiny"]) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["tiny", "run.seed=1", "--layouts", "a.yaml"],
        ["tiny", "--layouts", "a.yaml", "run.seed=1"],
        ["--layouts", "a.yaml", "tiny", "run.seed=1"],
    ],
)
def test_options_may_stand_anywhere(calls, words):
    assert main(["verify", *words]) == 0
    assert calls.list[-1] == ("verify", load("tiny", "run.seed=1"), "a.yaml")


def test_config_prints_what_loads_again(capsys, tmp_path):
    assert main(["config", "tiny", "train.steps=50"]) == 0
    path = tmp_path / "printed.yaml"
    path.write_text(capsys.readouterr().out)
    assert load(path) == load("tiny", "train.steps=50")


def test_schema_needs_no_config(capsys):
    assert main(["config", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema()
    assert main(["config"]) == 2
    assert (
        capsys.readouterr().err == "meshwright: config needs a preset or a YAML file, or --schema\n"
    )


def test_the_schema_reads_no_config(capsys):
    for words in (["tiny"], ["tiny", "mesh.tensor=2"]):
        assert main(["config", "--schema", *words]) == 2
        assert capsys.readouterr().err.startswith("meshwright: --schema reads no CONFIG: ")


@pytest.mark.parametrize(
    "words",
    [
        *(
            ["train", "gs://b/x"],
            ["verify", "gs://b/x"],
            ["plan", "gs://b/x"],
            ["config", "gs://b/x"],
        ),
        *(["tokenize", "gs://b/x"], ["train", "tiny", "run.dir=gs://b/x"], ["eval", "gs://b/x"]),
        *(["generate", "gs://b/x", "--prompt", "a"], ["verify", "tiny", "--layouts", "gs://b/x"]),
        *([["checkpoint", action, "gs://b/x"] for action in ("ls", "show", "verify")]),
        *(["schedule", "gs://b/x"], ["eval", "RUN", "data.store=gs://b/x"]),
        ["generate", "RUN", "--prompt", "a", "device.compile_cache=gs://b/x"],
        ["schedule", "gpipe", "--stages", "2", "--microbatches", "2", "--png", "gs://b/x"],
    ],
    ids=" ".join,
)
def test_a_url_is_refused_before_anything_is_written(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(load("tiny")))
    assert main(["run" if word == "RUN" else word for word in words]) == 2
    out, error = capsys.readouterr()
    line = (
        "gs://b/x: URLs are not built yet; write a local path, or ./gs:/b/x for a folder of that "
    )
    assert out == "" and line in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "config.yaml"]


def test_a_folder_that_is_named_like_a_url_can_be_meant(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gs:").mkdir()
    (tmp_path / "gs:" / "x.csv").write_text("F0,,,BW0\n,F0,BW0\n")
    assert main(["schedule", "./gs:/x.csv", "--json", "--png", "./gs:/x.png"]) == 0
    assert (tmp_path / "gs:" / "x.png").is_file()
    capsys.readouterr()
    for command in (["checkpoint", "ls"], ["eval"]):
        assert main([*command, "./gs:/run"]) == 2
        assert "URLs" not in (error := capsys.readouterr().err)
        assert str(tmp_path / "gs:" / "run") in error


@pytest.mark.parametrize("command", ["train", "verify", "plan", "config", "tokenize"])
def test_a_run_folder_is_no_config(command, calls, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "config.yaml").write_text("base: tiny\n")
    assert main([command, "runs/x"]) == 2
    assert capsys.readouterr().err == (
        "meshwright: runs/x: is a folder of a run, no config; write runs/x/config.yaml, and "
        "checkpoint.resume=auto to go on training it\n"
    )
    assert calls.list == []


@pytest.mark.parametrize(
    "words",
    [
        ["train", "tiny", "run.name=\udcff"],
        ["train", "\udcff"],
        ["eval", "\udcff"],
        ["generate", "run", "--prompt", "\udcff"],
        ["checkpoint", "ls", "\udcff"],
        ["verify", "tiny", "--layouts", "\udcff"],
        ["schedule", "\udcff"],
        ["plan", "tiny", "--target", "\udcff"],
    ],
    ids=lambda words: words[0],
)
def test_words_that_are_not_utf_8_are_one_line_and_2(words, calls, capsys):
    assert main(words) == 2
    out, error = capsys.readouterr()
    assert out == "" and "\\udcff: is not UTF-8; write it in UTF-8\n" in error
    assert error.count("\n") == 1


def test_tokenize_describes_the_store(monkeypatch, capsys):
    store = SimpleNamespace(
        build_store=lambda config, tokenizer: f"folder of {config.run.name}, {tokenizer}",
        open_store=lambda folder: f"store in {folder}",
        describe_store=lambda store: f"{store}: 3 documents",
    )
    monkeypatch.setitem(sys.modules, "meshwright.trainer.data.store", store)
    assert main(["tokenize", "tiny"]) == 0
    assert capsys.readouterr().out == "store in folder of tiny, None: 3 documents\n"


def test_schedule_as_json(capsys):
    words = ["schedule", "zb_h2", "--stages", "2", "--microbatches", "4", "--costs", "1,1.5,1"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "schedule": "zb_h2",
        "stages": 2,
        "microbatches": 4,
        "chunks": 1,
        "ticks": 13,
        "makespan": 15,
        "bubble": 1,
        "span": [14.5, 14],
        "tick_makespan": 16.5,
        "peak_live": [3, 3],
        "buffers": {"x": 2, "dy": 1, "stash": 3, "taps": 3},
        "formula": {"bubble": 0.5, "of": "span", "peak": 3},
    }


def test_schedule_as_text_and_picture(tmp_path, capsys):
    picture = tmp_path / "chart.png"
    words = ["1f1b", "--stages", "2", "--microbatches", "3", "--uniform", "--png", str(picture)]
    assert main(["schedule", *words]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1f1b, uniform: 2 stages, 3 micro-batches, 5 ticks",
        "stage 0  F0     F1     F2+BW0 BW1    BW2",
        "stage 1         F0+BW0 F1+BW1 F2+BW2",
        "costs       F 1, B 1, W 1, transfer 0",
        "makespan    12: 9 busy, bubble 3 (25.0%)",
        "in ticks    12: 9 busy, bubble 3 (25.0%), if all stages end each tick together",
        "spans       12 9, bubble 3 in the longest",
        "peak live   3 1 stages' activations",
        "buffers     x 1, dy 1, stash 3, taps 0",
        "published   bubble 3, peak 3",
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_schedule_of_a_file(tmp_path, capsys):
    path = tmp_path / "mine.csv"
    path.write_text("F0,,,BW0\n,F0,BW0\n")
    assert main(["schedule", str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schedule"], answer["stages"], answer["microbatches"]) == (str(path), 2, 1)
    assert (answer["makespan"], answer["formula"]) == (6, None)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["1f1b", "--stages", "4"], "1f1b needs its stages and its microbatches, as in 4 and 8"),
        (
            ["interleaved", "--stages", "4", "--microbatches", "6", "--chunks", "2"],
            "microbatches=6 is not a multiple of stages=4, which interleaved needs: "
            "write microbatches=8",
        ),
        (
            ["gpipe", "--stages", "4", "--microbatches", "8", "--chunks", "2"],
            "chunks=2: gpipe has 1 on each stage; write chunks=1",
        ),
        (
            ["1f1b", "--stages", "2", "--microbatches", "2", "--costs", "1,2"],
            "costs '1,2': write F,B,W or F,B,W,transfer, as in 1,1,1 or 2,2.5,1,0.1: "
            "none negative, F above 0",
        ),
        (["broken.csv"], "broken.csv: stage 1: W0 never runs"),
    ],
)
def test_wrong_schedules_are_one_line_and_2(words, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("broken.csv").write_text("F0,,,BW0\n,F0,B0\n")
    assert main(["schedule", *words]) == 2
    assert capsys.readouterr() == ("", f"meshwright: {line}\n")


def test_pipeline_docs_show_what_schedule_prints(capsys):
    text = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text(encoding="utf-8")
    shown = re.findall(r"^    \$ meshwright (schedule .*)\n((?:    .*\n)+)", text, re.MULTILINE)
    assert shown
    for command, output in shown:
        assert main(command.split()) == 0
        assert capsys.readouterr().out == textwrap.dedent(output)


@pytest.mark.parametrize("command", ["train", "verify", "config", "tokenize"])
def test_a_wrong_config_is_one_line_and_2(command, calls, capsys):
    assert main([command, "tiny", "mesh.tensr=2"]) == 2
    line = "meshwright: mesh.tensr: no such key; did you mean mesh.tensor?\n"
    assert capsys.readouterr() == ("", line)
    assert calls.list == []


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "Missing command."),
        (["trian", "tiny"], "No such command 'trian'. Did you mean 'train'?"),
        (["train"], "Missing argument 'CONFIG'."),
        (["train", "tiny", "--steps", "5"], "No such option '--steps'."),
        (["verify", "tiny", "--layout", "a.yaml"], "No such option '--layout'. Did you mean"),
        (["checkpoint", "list", "x"], "'list' is not one of 'ls', 'show', 'verify'."),
        (["generate", "x", "--prompt", "a", "--tokens", "b"], "'b' is not a valid integer"),
        (["plan", "tiny", "--json", "--memory"], "--memory is a table for people"),
    ],
)
def test_wrong_words_are_one_line_and_2(words, part, capsys):
    assert main(words) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("meshwright: ") and error.count("\n") == 1
    assert part in error


def test_a_value_error_of_a_library_keeps_its_traceback(calls, monkeypatch):
    monkeypatch.setattr(
        sys.modules["meshwright.trainer.loop"], "train", lambda config: json.loads("not JSON")
    )
    with pytest.raises(json.JSONDecodeError):
        main(["train", "tiny"])


def test_mistakes_and_help_start_no_jax():
    """In a fresh interpreter: importing the command line, help, and a wrong config bring no JAX."""
    code = """
import sys
from meshwright.trainer.cli import main
assert main(["--help"]) == 0
assert main(["train", "tiny", "mesh.tensr=2"]) == 2
assert main(["config", "tiny"]) == 0
assert main(["schedule", "1f1b", "--stages", "2", "--microbatches", "2"]) == 0
assert not {"jax", "matplotlib"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: meshwright" in done.stdout
    assert done.stderr == "meshwright: mesh.tensr: no such key; did you mean mesh.tensor?\n"


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("meshwright 0.")


def test_the_printed_tree_has_every_section_once(capsys):
    main(["config", "tiny"])
    assert list(yaml.safe_load(capsys.readouterr().out)) == list(schema()["properties"])
