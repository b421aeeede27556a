"""Config loading: layers, overrides, the one line for every mistake, and the way back to YAML."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.models.config import ModelConfig
from meshwright.trainer.config import Config
from meshwright.trainer.load import (
    ConfigError,
    describe,
    load,
    override,
    presets,
    schema,
    to_yaml,
)


@pytest.fixture
def write(tmp_path):
    """Write a YAML file into a folder of the test; returns its path."""

    def write(name: str, text: str):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def message(*arguments) -> str:
    """The one line that `load` raises."""
    with pytest.raises(ConfigError) as caught:
        load(*arguments)
    (line,) = str(caught.value).splitlines()
    return line


def test_overrides_are_yaml_and_the_last_wins():
    config = load(
        "tiny", "train.steps=70", "optimizer.lr=1e-3", "optimizer.clip=null", "run.name=a"
    )
    assert (config.train.steps, config.optimizer.lr, config.run.name) == (70, 1e-3, "a")
    assert config.optimizer.clip is None
    assert load("tiny", "train.steps=70", "train.steps=90").train.steps == 90
    assert load("tiny", "optimizer={lr: 0.5, eps: 1E-5}").optimizer.eps == 1e-5


def test_override_changes_a_config_that_is_loaded():
    config = load("tiny", "run.name=a")
    assert override(config, "train.steps=70", "layout.rules.embed=[]") == load(
        "tiny", "run.name=a", "train.steps=70", "layout.rules.embed=[]"
    )
    with pytest.raises(ConfigError, match="mesh.tensr: no such key"):
        override(config, "mesh.tensr=2")


def test_an_integer_is_good_for_a_float_and_arrives_as_one():
    rate = load("tiny", "optimizer.lr=1").optimizer.lr
    assert rate == 1.0
    assert type(rate) is float


def test_a_date_is_text():
    assert load("tiny", "run.name=2026-01-31").run.name == "2026-01-31"


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "+1e-3", ".1e-2", "10.e-4", "0.001"])
def test_floats_without_a_dot(text):
    assert load("tiny", f"optimizer.lr={text}").optimizer.lr == pytest.approx(1e-3, rel=1e-15)


def test_base_is_merged_section_by_section(write):
    write("base.yaml", "base: tiny\nmesh: {tensor: 1, fsdp: 4}\nlayout: {rules: {embed: [data]}}\n")
    path = write("inner/run.yaml", "base: ../base.yaml\nmesh: {fsdp: 2, data: 4}\nrun: {name: x}\n")
    config = load(path, "run.seed=3")
    assert (config.mesh.data, config.mesh.fsdp, config.mesh.tensor) == (4, 2, 1)
    assert config.layout.rules == {"embed": ["data"]}
    assert config.model == load("tiny").model
    assert (config.run.name, config.run.seed) == ("x", 3)


def test_an_empty_file_is_all_defaults(write):
    assert load(write("empty.yaml", "# nothing\n")) == Config()


def test_a_preset_wins_over_a_file_of_its_name(write, monkeypatch):
    path = write("tiny", "run: {name: mine}\n")
    monkeypatch.chdir(path.parent)
    assert load("tiny").run.name == "tiny"
    assert load("./tiny").run.name == "mine"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        # unknown keys: the nearest name, in the section before elsewhere
        ("mesh.tensr=2", "mesh.tensr: no such key; did you mean mesh.tensor?"),
        ("trian.steps=2", "trian: no such key; did you mean train?"),
        ("train.lr=1", "train.lr: no such key; did you mean optimizer.lr?"),
        ("steps=1", "steps: no such key; did you mean train.steps?"),
        ("log.xyzzy=1", "log.xyzzy: no such key; known are log.every"),
        # types
        ("optimizer.lr=fast", "optimizer.lr=fast: should be a valid number"),
        ("mesh.tensor=true", "mesh.tensor=true: should be a valid integer"),
        ("mesh.tensor=2.0", "mesh.tensor=2.0: should be a valid integer"),
        ("layout.sequence_parallel=1", "layout.sequence_parallel=1: should be a valid boolean"),
        ("data.paths=a.txt", "data.paths=a.txt: should be a list, [a, b]"),
        ("data.paths=[1]", "data.paths.0=1: should be text; quote it for YAML, and once more for"),
        ("run.name=1e5", "run.name=100000.0: should be text; quote it for YAML, and once more for"),
        ("mesh.dcn=2", "mesh.dcn=2: should be a mapping, {a: 1}"),
        ("optimizer.lr.x=3", "optimizer.lr={x: 3}: should be a valid number"),
        # values
        (
            "optimizer.name=adam",
            "optimizer.name=adam: should be 'adamw', 'lion', 'adafactor', 'sgd', 'muon' or 'lamb'; "
            "did you mean adamw?",
        ),
        ("train.batch_size=0", "train.batch_size=0: should be greater than 0"),
        ("optimizer.lr=.inf", "optimizer.lr=.inf: should be a finite number"),
        ("run.seed=4294967296", "run.seed=4294967296: should be less than 4294967296"),
        ("run.name=''", "run.name='': should have at least 1 character"),
        # the override itself
        ("mesh=3", "mesh=3: mesh is a section; write mesh.KEY=value"),
        ("mesh", "mesh: an override is written key=value, as in train.steps=100"),
        ("=3", "=3: an override is written key=value, as in train.steps=100"),
        ("mesh.=3", "mesh.=3: an override is written key=value, as in train.steps=100"),
        ("run.name={", "run.name={: expected the node content, but found '<stream end>'"),
        ("run={name: a, name: b}", "run={name: a, name: b}: name is written twice"),
        ("run={[a]: b}", "run={[a]: b}: found unhashable key"),
        ("run.seed=!!int x", "run.seed=!!int x: invalid literal for int() with base 10: 'x'"),
        # what fields and sections must agree on, in the words of their own checks
        ("mesh.replica=2", "mesh.replica=2: the replica axis is not built yet; write mesh.replica"),
        ("train.microbatches=3", "train.batch_size=32 is not a multiple of train.microbatches=3"),
        ("layout.zero=true", "layout.zero=true: should be a valid integer"),
        ("run.name=a/b", "run.name=a/b: should be a name, not a path; run.dir is the path"),
        ("run.name=..", "run.name=..: should be a name, not a path; run.dir is the path"),
        ("data.paths=[/nope]", "data.paths=[/nope] is not read by data.source=stdlib; write data."),
        ("device.platform=gpu", "device.cpu_devices=8 simulates CPU devices, but device.platform="),
        (
            "model.vocab_size=256",
            "model.vocab_size=256: data.tokenizer=byte needs at least 257, 25",
        ),
    ],
)
def test_c36_mistakes_are_one_line(words, line):
    assert message("tiny", words).startswith(line)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["mesh.data=3"], ["mesh.data=3", "12 devices", "device.cpu_devices=8"]),
        (["mesh.data=-1", "mesh.fsdp=3"], ["multiple of 6", "device.cpu_devices=8"]),
        (
            ["optimizer.schedule=wsd", "optimizer.warmup=350"],
            ["optimizer.warmup=350", "optimizer.cooldown=80", "train.steps=400"],
        ),
        (["data.source=text"], ["data.source=text", "data.paths"]),
        (["data.source=store"], ["data.source=store", "data.store"]),
    ],
)
def test_sections_that_disagree_name_both_keys(overrides, parts):
    line = message("tiny", *overrides)
    assert [part for part in parts if part not in line] == []


def test_wsd_may_fill_the_run_to_the_last_update():
    load("tiny", "optimizer.schedule=wsd", "optimizer.warmup=300", "optimizer.cooldown=100")
    assert "together longer" in message(
        "tiny", "optimizer.schedule=wsd", "optimizer.warmup=300", "optimizer.cooldown=101"
    )


def test_all_mistakes_come_at_once():
    line = message("tiny", "mesh.tensr=2", "optimizer.lr=fast")
    assert line == (
        "mesh.tensr: no such key; did you mean mesh.tensor?; "
        "optimizer.lr=fast: should be a valid number"
    )


def test_long_values_are_cut_short():
    line = message("tiny", f"optimizer.lr={'x ' * 1000}")
    assert len(line) < 120


@pytest.mark.parametrize("name", ["tny", "tniy"])
def test_unknown_preset(name):
    choices = "llama3-8b, long_context, mixtral-8x7b, moe, qwen3-30b-a3b, small, tiny"
    expected = f"{name}: no such preset or file; choose {choices}; did you mean tiny?"
    assert message(name) == expected


def test_files_that_cannot_be_used(write, tmp_path):
    assert "nowhere.yaml: no such preset or file" in message(tmp_path / "nowhere.yaml")
    assert "no such preset or file" in message(tmp_path)
    assert "should be a mapping of sections, not [1]" in message(write("list.yaml", "- 1\n"))
    twice = write("twice.yaml", "run:\n  name: a\n  dir: b\n  name: c\n")
    assert message(twice) == f"{twice}, line 4: name is written twice"
    assert "control.yaml: unacceptable character" in message(write("control.yaml", "run: \x07\n"))
    assert "tab.yaml, line 2:" in message(write("tab.yaml", "run:\n\tname: a\n"))
    latin = write("latin.yaml", "")
    latin.write_bytes(b"run: {name: \xe9}\n")
    assert "latin.yaml: cannot be read" in message(latin)


def test_bases_that_cannot_be_used(write):
    write("a.yaml", "base: b.yaml\n")
    line = message(write("b.yaml", "base: a.yaml\n"))
    assert line == "base: b.yaml -> a.yaml -> b.yaml goes in a circle"
    assert "did you mean small?" in message(write("near.yaml", "base: smal\n"))
    assert "base=3: should be one preset's name" in message(write("number.yaml", "base: 3\n"))


@pytest.mark.parametrize("name", sorted(presets()))
def test_presets_survive_the_way_to_yaml_and_back(name, tmp_path):
    config = load(name)
    assert config.run.name == name
    for text in (to_yaml(config), describe(config)):
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        assert load(path) == config


positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


@pytest.mark.slow
@given(
    name=st.text(min_size=1),
    field=st.text(),
    lr=positive,
    eps=positive,
    seed=st.integers(0, 2**32 - 1),
)
def test_any_text_and_number_survives_the_way_to_yaml_and_back(
    tmp_path_factory, name, field, lr, eps, seed
):
    config = load("tiny")
    config = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, dir=name, seed=seed),
        data=dataclasses.replace(config.data, field=field),
        optimizer=dataclasses.replace(config.optimizer, lr=lr, eps=eps),
    )
    path = tmp_path_factory.mktemp("round", numbered=True) / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load(path) == config


@pytest.mark.parametrize("text", ["1e-3", "1E5", "true", "null", "2026-01-31", "007", "a: b", " "])
def test_text_that_looks_like_something_else_stays_text(text, tmp_path):
    config = dataclasses.replace(
        load("tiny"), data=dataclasses.replace(load("tiny").data, field=text)
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert load(tmp_path / "config.yaml").data.field == text


@pytest.mark.parametrize("name", sorted(presets()))
def test_describe_is_aligned_and_fits(name):
    lines = describe(load(name)).splitlines()
    assert max(map(len, lines)) <= 110
    assert len({line.index("# ") for line in lines if "# " in line}) == 1
    fields = [line for line in lines if not line.endswith(":") and not line.strip().startswith("#")]
    assert all("# " in line for line in fields)
    assert "  name: adamw" in describe(load(name))
    assert "# update rule: adamw | lion | adafactor" in describe(load(name))


def test_schema_describes_every_field():
    tree = schema()
    sections = tree["$defs"]
    assert set(tree["properties"]) == {field.name for field in dataclasses.fields(Config)}
    for section in sections.values():
        assert section["additionalProperties"] is False
        for name, field in section["properties"].items():
            assert field.get("description"), name


def parameters(model: ModelConfig) -> int:
    """Parameters of the transformer, by hand."""
    attention = model.d_model * model.size_per_head * 2 * (model.heads + model.num_kv_heads)
    experts, router = model.experts or 1, model.d_model * (model.experts or 0)
    norms = 2 * model.d_model + model.qk_norm * 2 * model.size_per_head
    block = attention + 3 * experts * model.d_model * model.d_ff + router + norms
    tables = (1 if model.tie_embeddings else 2) * model.vocab_size * model.d_model
    return model.layers * block + tables + model.d_model


def test_presets_have_the_size_they_say():
    assert 95e6 < parameters(load("small").model) < 105e6
    assert parameters(load("llama3-8b").model) == 8_030_261_248  # Llama 3 8B as published
    assert parameters(load("mixtral-8x7b").model) == 46_702_792_704
    assert parameters(load("qwen3-30b-a3b").model) == 30_532_122_624
