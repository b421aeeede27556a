"""The command line: what each command calls, exit codes, one line for the user's mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml

from meshwright.trainer.cli import main
from meshwright.trainer.load import load, schema, to_yaml


@pytest.fixture
def calls(monkeypatch):
    """Everything the commands call, in order; no JAX is started. A test may change the answers."""
    made = SimpleNamespace(list=[], verify=True)

    def record(module: str, name: str, answer):
        def call(*arguments):
            made.list.append((name, *arguments))
            return answer(*arguments)

        monkeypatch.setitem(sys.modules, f"meshwright.{module}", SimpleNamespace(**{name: call}))

    record("trainer.device", "prepare_devices", lambda device: None)
    record("trainer.loop", "train", lambda config: None)
    record("trainer.evaluate", "evaluate_run", lambda run, overrides: "eval_loss 1.5")
    record("trainer.verify", "verify", lambda config, layouts: made.verify)
    return made


def test_train_prepares_devices_first(calls):
    assert main(["train", "tiny", "mesh.fsdp=1", "mesh.data=4"]) == 0
    config = load("tiny", "mesh.fsdp=1", "mesh.data=4")
    assert calls.list == [("prepare_devices", config.device), ("train", config)]


def test_eval_takes_the_config_of_the_run(calls, tmp_path, capsys):
    config = load("tiny", "device.cpu_devices=4", "mesh.data=-1")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert main(["eval", str(tmp_path), "mesh.data=1"]) == 0
    assert calls.list == [
        ("prepare_devices", config.device),
        ("evaluate_run", str(tmp_path), ["mesh.data=1"]),
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


def test_tokenize_describes_the_store(monkeypatch, capsys):
    store = SimpleNamespace(
        build_store=lambda config: f"folder of {config.run.name}",
        open_store=lambda folder: f"store in {folder}",
        describe_store=lambda store: f"{store}: 3 documents",
    )
    monkeypatch.setitem(sys.modules, "meshwright.trainer.data.store", store)
    assert main(["tokenize", "tiny"]) == 0
    assert capsys.readouterr().out == "store in folder of tiny: 3 documents\n"


@pytest.mark.parametrize("command", ["train", "verify", "config", "tokenize"])
def test_a_wrong_config_is_one_line_and_2(command, calls, capsys):
    assert main([command, "tiny", "mesh.tensr=2"]) == 2
    line = "meshwright: mesh.tensr: no such key; did you mean mesh.tensor?\n"
    assert capsys.readouterr() == ("", line)
    assert calls.list == []


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "required: COMMAND"),
        (["trian", "tiny"], "invalid choice: 'trian'"),
        (["train"], "required: CONFIG"),
        (["train", "tiny", "--steps", "5"], "no such option: --steps"),
        (["verify", "tiny", "--layout", "a.yaml"], "no such option: --layout"),
    ],
)
def test_wrong_words_exit_2(words, part, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert part in capsys.readouterr().err


def test_a_value_error_of_a_library_keeps_its_traceback(calls, monkeypatch):
    monkeypatch.setattr(
        sys.modules["meshwright.trainer.loop"], "train", lambda config: json.loads("not JSON")
    )
    with pytest.raises(json.JSONDecodeError):
        main(["train", "tiny"])


def test_mistakes_and_help_start_no_jax():
    """In a fresh interpreter: importing the command line, help, and a wrong config bring no JAX."""
    code = """
import contextlib, sys
from meshwright.trainer.cli import main
with contextlib.suppress(SystemExit):
    main(["--help"])
assert main(["train", "tiny", "mesh.tensr=2"]) == 2
assert main(["config", "tiny"]) == 0
assert "jax" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "usage: meshwright" in done.stdout
    assert done.stderr == "meshwright: mesh.tensr: no such key; did you mean mesh.tensor?\n"


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("meshwright 0.")


def test_the_printed_tree_has_every_section_once(capsys):
    main(["config", "tiny"])
    assert list(yaml.safe_load(capsys.readouterr().out)) == list(schema()["properties"])
