"""Config loading: layers, overrides, the one line for every mistake, and the way back to YAML."""

from __future__ import annotations

import dataclasses
import re
import shlex
import typing
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from meshwright.models.config import ModelConfig
from meshwright.trainer.config import Config
from meshwright.trainer.config.load import (
    RENAMED,
    ConfigError,
    _fields,
    describe,
    from_yaml,
    load,
    override,
    presets,
    schema,
    show,
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
        ("run={seed: !!int x}", "run={seed: !!int x}: x is not an integer"),
        ("run={seed: !!float x}", "run={seed: !!float x}: could not convert string to float: 'x'"),
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
        (
            "train={dropout: 0.1, seq_len: 67108868}",  # × 64 channels
            "train.dropout=0.1: a row has train.seq_len=67108868 times model.d_model=64 elements",
        ),
    ],
)
def test_mistakes_are_one_line(words, line):
    """Case C36."""
    assert message("tiny", words).startswith(line)


def test_more_choices_of_experts_than_counters_hold_are_refused():
    words = "model.moe.experts=8", "train.batch_size=1048576", "train.seq_len=1024"
    assert "are 2147483648 choices of experts; write fewer" in message("tiny", *words)
    load("tiny", *words, "model.moe.experts_per_token=1", "device.cpu_devices=null")


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
    choices = (
        "latent, llama3-8b, local_global, long_context, mixtral-8x7b, moe, qwen3-30b-a3b, small, "
        "tiny"
    )
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
        run=dataclasses.replace(config.run, seed=seed),
        log=dataclasses.replace(config.log, sample=name),
        data=dataclasses.replace(config.data, source="jsonl", paths=["a"], field=field),
        optimizer=dataclasses.replace(config.optimizer, lr=lr, eps=eps),
    )
    path = tmp_path_factory.mktemp("round", numbered=True) / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load(path) == config


@pytest.mark.parametrize(
    "text",
    [
        *("1e-3", "1E5", "+.5", "true", "null", "~", "2026-01-31", "007", "1:30", "0x10", "1_000"),
        *("a: b", " ", "", "a #b", "=", "<<", "- a", "yes", ".inf", "1\n"),
    ],
)
def test_text_that_looks_like_something_else_stays_text(text, tmp_path):
    """To YAML and back, also for readers that take 007 for an octal number."""
    tiny = load("tiny")
    data = dataclasses.replace(tiny.data, source="jsonl", paths=["a"], field=text)
    written = to_yaml(dataclasses.replace(tiny, data=data))
    (tmp_path / "config.yaml").write_text(written, encoding="utf-8")
    assert load(tmp_path / "config.yaml").data.field == text
    assert yaml.safe_load(written)["data"]["field"] == text


# The word after =


@pytest.mark.parametrize(
    "text",
    [
        *(
            "exp #3",
            "/data/my runs #2/x",
            "#",
            "def ",
            " def",
            "a: b",
            "- a",
            "-",
            "*a",
            "&a",
            "!a",
        ),
        *("|", ">", "%a", "@a", "`a", "?", "? a", ", a", "a [b]", "f[v2].txt", "a{b}", "a'b"),
        *("010", "1:30", "1:30.5", "2026-01-31", "0o10", "1.2.3", "=", "<<", "tab\there", "a\nb"),
        *("~", "yes", "No", "on", "OFF"),
        *(" 1", "1 ", "1\n", "true ", "null\n", " null", "1,000", "---", "...", "ü", "😀", "\\n"),
    ],
)
def test_the_word_after_the_equals_sign_is_text_as_it_stands(text):
    assert load("tiny", f"log.sample={text}").log.sample == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'exp #3'", "exp #3"),
        ('"exp #3"', "exp #3"),
        ("'[v2]'", "[v2]"),
        ('"  "', "  "),
        ('"\\u00fc\\ud83d\\ude00"', "ü😀"),  # JSON's two halves of a character
        ("'010'", "010"),
        ("'1e5'", "1e5"),
        ("null", None),
        ("", None),
    ],
)
def test_quotes_and_null_are_yaml(text, value):
    assert load("tiny", f"log.sample={text}").log.sample == value


@pytest.mark.parametrize(
    "text",
    [
        *("[v2]/runs", "[a] #b", "[a] ", "[a]\n", "{a} b", '"a" b', '"a" #b', "'a'b", '"a": b'),
        *(
            '"a\u2028b" c',
            '"\U000e0001" c',
            "{a: 1}: b",
            "[&a b]",
            '{a: &b "c"}',
            "[a, b #c\n]",
            "{a: b,\n#c\n}",
            "[a]\n...",
            "[a]\n---\n[b]",
            "'tis",
            "[*.txt]",
        ),
    ],
)
def test_what_would_be_left_out_of_a_word_is_refused(text):
    """And the message says what to write, which is the text itself."""
    line = message("tiny", f"log.sample={text}")
    assert line.startswith("log.sample=")
    (cure,) = shlex.split(line.rpartition("once more for the shell: ")[2])
    assert load("tiny", cure).log.sample == text


def test_octal_and_sexagesimal_numbers_are_text(write):
    for text in ("010", "-017", "1:30", "1:30:00", "0_1"):
        line = f"train.steps={show(text)}: should be a valid integer"
        assert message("tiny", f"train.steps={text}") == line
        assert message("tiny", f"train={{steps: {text}}}") == line
        assert message(write("run.yaml", f"train: {{steps: {text}}}\n")) == line
    assert message("tiny", "optimizer.lr=1:30.5").startswith("optimizer.lr='1:30.5': should be")
    assert "010 is not an integer" in message("tiny", "train={steps: !!int 010}")
    assert load("tiny", "train.steps=0x10").train.steps == 16
    assert load("tiny", "train.steps=1_000").train.steps == 1000


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("run.name=\udcff", "run.name=\\udcff: is not UTF-8"),
        ("run.na\udcffme=a", "run.na\\udcffme=a: is not UTF-8"),
        ("data.paths=[a\udcff]", "data.paths=[a\\udcff]: is not UTF-8"),
        ('run.name="\\ud800"', "is no config: unexpected end of hex escape"),
        ("data.paths=" + "[" * 5000 + "]" * 5000, "nested too deep"),
        ("data.paths=" + "[" * 220 + "]" * 220, "nested too deep"),
        ("data={" + "a: {" * 220 + "}" * 220 + "}", "nested too deep"),
        (".".join(["a"] * 5000) + "=1", "nested too deep"),
        (".".join(["a"] * 220) + "=1", "nested too deep"),
        ("train.steps=0x" + "f" * 5000, "an integer of 5002 characters is more than any key takes"),
        ("train.steps=" + "9" * 5000, "an integer of 5000 characters is more than any key takes"),
        ("train.steps=0b" + "1" * 5000, "an integer of 5002 characters is more than any key takes"),
        ("optimizer.lr=" + "9" * 5000 + ".", "optimizer.lr=.inf: should be a finite number"),
        ("train={steps: 0x" + "f" * 5000 + "}", "an integer of 5002 characters is more than"),
        ("data.paths=[!!float ]", "data.paths=[!!float ]: string index out of range"),
        ("data.paths=[!!bool x]", "data.paths=[!!bool x]: 'x'"),
        ("data.paths=[!!timestamp x]", "data.paths=[!!timestamp x]: "),
        ("data.paths=[&a [*a]]", "is no config: Circular reference"),
        ("run={? !!binary aGk= : a}", "is no config: keys must be str"),
        ("run.a\nb=1", "run.a\\nb: no such key"),
        ("run.name=a\nb", "run.name=a\\nb: should be a name"),
        ("run.name=a\0b", "run.name=a\\u0000b: should be a name"),
    ],
)
def test_words_that_no_tree_can_hold_are_one_line(words, part):
    line = message("tiny", words)
    assert part in line
    assert len(line) < 400


def test_files_and_paths_that_no_tree_can_hold_are_one_line(write):
    deep = write("deep.yaml", "run: " + "[" * 5000 + "]" * 5000)
    assert message(deep) == f"{deep}: nested too deep"
    assert "more than any key takes" in message(
        write("huge.yaml", f"run: {{seed: 0x{'f' * 5000}}}")
    )
    assert message("a\udcff.yaml").startswith("a\\udcff.yaml: is not UTF-8")
    assert "there is no home folder of that user" in message("~nobody-of-that-name/a.yaml")


# Keys that nothing reads

RULES = ("adamw", "lion", "adafactor", "sgd", "muon", "lamb")
UNREAD = [  # what is written, the setting that does not read it, those that do
    *(
        (f"optimizer.{key}", f"optimizer.name={name}", readers)
        for key, readers in (
            ("b1=0.9", "adamw, lamb, lion, muon"),
            ("b2=0.95", "adamw, lamb, lion, muon"),
            ("eps=1e-8", "adamw, lamb, muon"),
            ("momentum=0.0", "sgd, muon"),
            ("nesterov=false", "sgd, adamw, lamb"),
            ("min_dim_size_to_factor=128", "adafactor"),
        )
        for name in RULES
        if name not in readers.split(", ")
    ),
    ("optimizer.final_ratio=0.1", "optimizer.schedule=constant", "cosine, linear, wsd"),
    ("optimizer.final_ratio=0.1", "optimizer.schedule=inverse_sqrt", "cosine, linear, wsd"),
    ("optimizer.cooldown=3", "optimizer.schedule=cosine", "wsd"),
    ("precision.loss_scale=torch", "precision.compute=f32", "f16"),
    ("precision.first_scale=2.0", "precision.compute=bf16", "f16"),
    ("data.field=body", "data.source=stdlib", "jsonl"),
    ("train.max_skipped=3", "train.halt_on_nan=true", "false"),
    ("layout.chunks=2", "layout.schedule=1f1b", "interleaved"),
    ("layout.ulysses=2", "layout.context=ring", "usp"),
    ("remat.every=3", "remat.policy=none", "full, selective, offload"),
    ("remat.names=[]", "remat.policy=full", "selective, offload"),
    ("model.rope_scaling.factor=2.0", "model.rope_scaling.kind=none", "linear, ntk, yarn, llama3"),
    ("model.rope_scaling.low=2.0", "model.rope_scaling.kind=ntk", "yarn, llama3"),
    ("model.moe.routing_group=8", "model.moe.capacity_factor=null", None),
    ("model.moe.overflow=probability", "model.moe.capacity_factor=null", None),
    ("model.moe.aux_loss_over=microbatch", "model.moe.aux_loss=0.0", None),
]


@pytest.mark.parametrize(("written", "setting", "readers"), UNREAD)
def test_a_key_that_nothing_reads_is_refused(written, setting, readers):
    """Even where it is written with the value that its reader would take anyway."""
    of_experts = ("model.routing", "model.moe.overflow", "model.moe.aux_loss_over")
    experts = ["model.moe.experts=8"] if written.startswith(of_experts) else []
    cure = f", only by {readers}; leave it out"
    if readers is None:
        cure = f"; write {setting.partition('=')[0]}="
    line = message("tiny", *experts, setting, written)
    assert line.startswith(f"{written} is not read by {setting}{cure}")


def test_what_no_single_setting_reads_is_refused():
    line = "optimizer.moments=bf16 is not read by optimizer.name=sgd with optimizer.momentum=null, "
    assert message("tiny", "optimizer.name=sgd", "optimizer.moments=bf16").startswith(line)
    line = "optimizer.groups.bias: a model with model.bias=none and model.attention_sink=false has "
    assert message("tiny", "optimizer.groups.bias.lr=0.5").startswith(line)
    load("tiny", "optimizer.groups.bias.lr=0.5", "model.attention_sink=true")
    line = "model.moe.capacity_factor=2.0 is not read by model.moe.experts=null; write model.moe."
    assert message("tiny", "model.moe.capacity_factor=2").startswith(line)


def test_null_stands_for_the_usual_values():
    settings = load("tiny").optimizer.settings
    assert settings == (0.9, 0.95, 1e-8, 0.0, False, 128, 0.1)
    assert load("tiny", "optimizer.name=muon").optimizer.settings.momentum == 0.95
    written = "optimizer.name=muon", "optimizer.b1=0.5", "optimizer.eps=1", "optimizer.momentum=0"
    assert load("tiny", *written).optimizer.settings[:4] == (0.5, 0.95, 1.0, 0.0)


def test_numbers_beyond_what_devices_count_with_are_refused():
    for key in (
        *("train.steps", "train.batch_size", "train.seq_len", "train.microbatches"),
        *("train.eval_batch_size", "optimizer.cooldown", "model.window"),
    ):
        line = message("tiny", f"{key}=2147483648")
        assert line.startswith(f"{key}=2147483648: should be less than 2147483648")
    load("tiny", "train.steps=2147483647", "run.seed=4294967295")
    line = message("tiny", f"optimizer.warmup={2**31 * 4096}tokens")
    assert line.startswith(
        f"optimizer.warmup={2**31 * 4096}tokens are 2147483648 updates; write few"
    )
    assert message("tiny", "optimizer.warmup=2147483648") == (
        "optimizer.warmup=2147483648 are 2147483648 updates; write fewer than 2147483648 of them"
    )


# URLs


URLS = [
    "gs://bucket/runs",
    "s3://b/r",
    "S3:/b/r",
    "hf://o/m",
    "file:///tmp/x",
    "gcs+x-1.0:/b",
    " gs://b",
]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("run.dir", ()),
        ("checkpoint.init_from", ()),
        ("data.store", ()),
        ("device.compile_cache", ()),
        ("layout.schedule_file", ()),
        ("data.paths.1", ("data.source=text",)),
    ],
)
def test_a_url_is_refused_by_every_key_that_names_a_path(url, key, more):
    override = f"data.paths=[a, '{url}']" if "paths" in key else f"{key}={url}"
    line = message("tiny", *more, override)
    assert line.startswith(f"{key}={show(url)}: URLs are not built yet; write a local path, or ./")
    local = line.partition("or ")[2].partition(" for a")[0]
    config = load("tiny", "data.source=text", f"data.paths=['{local}']", f"run.dir={local}")
    assert (config.data.paths, config.run.dir) == ([local], local)


def test_every_key_that_names_a_path_is_declared_as_one():
    """A new one must be: what describes itself as a folder, a file or a glob."""
    paths = {
        f"{section}.{key.name}"
        for section, kind in typing.get_type_hints(Config).items()
        for key in dataclasses.fields(kind)
        if re.match(r"(run )?(folder|files)\b|.*\bCSV file\b", _meaning(kind, key.name))
    }
    assert paths == {
        *("run.dir", "checkpoint.init_from", "data.store", "data.paths"),
        *("device.compile_cache", "layout.schedule_file"),
    }


def test_a_url_as_config_or_base_is_refused(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = (
        "URLs are not built yet; write a local path, or ./gs:/b/run.yaml for a folder of that name"
    )
    assert message("gs://b/run.yaml") == f"gs://b/run.yaml: {line}"
    assert message(Path("gs://b/run.yaml")) == f"gs:/b/run.yaml: {line}"
    assert message(write("run.yaml", "base: gs://b/run.yaml\n")) == f"base=gs://b/run.yaml: {line}"
    (tmp_path / "gs:" / "b").mkdir(parents=True)
    (tmp_path / "gs:" / "b" / "run.yaml").write_text("run: {name: local}")
    assert load("./gs:/b/run.yaml").run.name == "local"


@pytest.mark.parametrize(
    "path", ["C:/runs", "a b:/c", "./gs://b", "/gs://b", "1s:/b", "gs:b", "~/x"]
)
def test_what_only_looks_like_a_url_is_a_path(path):
    assert load("tiny", f"run.dir={path}").run.dir == path


def test_a_path_with_a_nul_character_is_refused():
    assert message("tiny", 'run.dir="a\\0b"').endswith(
        "no path holds a NUL character; write a local path"
    )


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/400"])
def test_a_run_folder_as_config_says_what_to_write(inside, tmp_path):
    (tmp_path / "x" / "checkpoints" / "400").mkdir(parents=True)
    (tmp_path / "x" / "config.yaml").write_text("run: {name: x}")
    folder = tmp_path / "x" / inside
    written = tmp_path / "x" / "config.yaml"
    assert message(folder) == (
        f"{folder}: is a folder of a run, no config; write {written}, and checkpoint.resume=auto "
        f"to go on training it"
    )
    assert load(written).run.name == "x"


def _meaning(kind, name: str) -> str:
    return kind.__pydantic_fields__[name].description


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
    experts, router = model.moe.experts or 1, model.d_model * (model.moe.experts or 0)
    norms = 2 * model.d_model + (model.qk_norm == "head") * 2 * model.size_per_head
    block = attention + 3 * experts * model.d_model * model.d_ff + router + norms
    tables = (1 if model.tie_embeddings else 2) * model.vocab_size * model.d_model
    return model.layers * block + tables + model.d_model


def test_presets_have_the_size_they_say():
    assert 95e6 < parameters(load("small").model) < 105e6
    assert parameters(load("llama3-8b").model) == 8_030_261_248  # Llama 3 8B as published
    assert parameters(load("mixtral-8x7b").model) == 46_702_792_704
    assert parameters(load("qwen3-30b-a3b").model) == 30_532_122_624


def test_segments_are_described_and_kept_in_yaml():
    written = "model.segments=[{repeats: 2, layers: [{window: 64}]}, {layers: [{rope: false}]}]"
    config = load("tiny", written)
    assert [segment.repeats for segment in config.model.segments or ()] == [2, 1]
    assert from_yaml(describe(config), "printed") == from_yaml(to_yaml(config), "kept") == config


def test_an_old_key_names_its_new_place():
    line = "model.experts: no such key; it is called model.moe.experts now"
    assert message("tiny", "model.experts=8") == line
    every = {".".join(path) for path, _ in _fields(Config)}
    assert set(RENAMED.values()) <= every and not set(RENAMED) & every


LATENT = ("model.mixer=mla", "model.kv_heads=null")


@pytest.mark.parametrize(
    ("written", "line"),
    [
        (("model.segments=[{layers: [{}]}]",), "model.segments has 1 layers, but model.layers=3"),
        (("model.segments=[{layers: [{mixer: rnn}]}]",), "model.segments.0.layers.0.mixer=rnn: "),
        (("model.window_pattern=[]",), "model.window_pattern=[]: "),
        (("model.mixer=mla",), "model.kv_heads=2 is not read by model.mixer=mla"),
        (LATENT, "model.mla.kv_rank=null is the width of the latent"),
        ((*LATENT, "model.mla.kv_rank=0"), "model.mla.kv_rank=0: should"),
        ((*LATENT, "model.window=4"), "model.window=4 is not read by model.mixer=mla"),
        (("model.mla.kv_rank=8",), "model.mla.kv_rank=8 is not read by model.mixer=attention"),
        (("model.mla.q_rank=8",), "model.mla.q_rank=8 is not read by model.mla.kv_rank=null"),
        (("model.window=4", "model.window_pattern=[4]"), "model.window=4 and model.window_patt"),
        (
            (
                *LATENT,
                "model.mla.kv_rank=8",
                "model.segments=[{repeats: 3, layers: [{window: 4}]}]",
            ),
            "model.segments: window: 4 is not read by mixer: mla",
        ),
        (
            ("model.segments=[{repeats: 3, layers: [{rope: false, rope_theta: 5.0}]}]",),
            "model.segments: rope_theta: 5.0 is not read with rope: false",
        ),
        (
            ("model.mla.kv_rank=8", "model.segments=[{repeats: 3, layers: [{mixer: mla}]}]"),
            "model.mixer=attention is that of no layer of model.segments; write model.mixer=mla",
        ),
        (("model.dense_layers=1",), "model.dense_layers=1 is not read by a model without experts"),
        (("model.local_rope_theta=5.0",), "model.local_rope_theta=5.0 is not read by model.wind"),
    ],
)
def test_patterns_and_latents_that_make_no_sense_are_refused(written, line):
    assert message("tiny", *written).startswith(line)
