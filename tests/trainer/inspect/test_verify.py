"""verify: the cover, the batch, the verdict. That layouts ARE equal is tested in equivalence/."""

from __future__ import annotations

from dataclasses import fields
from itertools import combinations, product
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from meshwright.trainer.cli import main
from meshwright.trainer.config import Config, PrecisionConfig
from meshwright.trainer.config.load import override, to_yaml
from meshwright.trainer.inspect import verify
from meshwright.trainer.inspect.verify import (
    CHOICES,
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    PIPELINES,
    REFERENCE,
    Comparison,
    pairwise_cover,
    possible_pipelines,
    read_layouts,
    synthetic_batch,
)

EQUAL = {"layout": "mesh.data=2", "loss": 0.0, "metrics": 0.0, "norm": 0.0, "gradient": 0.0}


@pytest.mark.parametrize(
    ("figure", "tolerance"),
    [
        ("loss", LOSS_TOLERANCE),
        ("metrics", LOSS_TOLERANCE),
        ("norm", GRADIENT_TOLERANCE),
        ("gradient", GRADIENT_TOLERANCE),
    ],
)
def test_equal_up_to_the_tolerance(figure, tolerance):
    assert Comparison(**EQUAL | {figure: tolerance}, leaf="embed").equal
    assert not Comparison(**EQUAL | {figure: 1.01 * tolerance}, leaf="embed").equal
    assert not Comparison(**EQUAL | {figure: np.inf}, leaf="embed").equal


def test_one_layout_beside_one_device(small_config, tmp_path, capsys):
    """The whole way once, from the command line: two compilations."""
    config = tmp_path / "small.yaml"
    config.write_text(to_yaml(override(small_config, "optimizer.lr=1")), encoding="utf-8")
    layouts = tmp_path / "layouts"
    layouts.write_text("# one\n\nmesh.fsdp=2  mesh.tensor=2 # and why\n", encoding="utf-8")
    assert main(["verify", str(config), "--layouts", str(layouts)]) == 0
    captured = capsys.readouterr()
    assert (
        captured.err
        == "meshwright: compiling the step of one device and of 1 layout(s) for 8 × cpu\n"
    )
    *_, line, last = captured.out.splitlines()
    assert line.startswith("equal ")
    assert line.endswith("mesh.fsdp=2  mesh.tensor=2")
    assert last == "1 of 1 layouts equal one device"


@pytest.fixture
def fake(monkeypatch):
    """Layouts with gradients from a table instead of a compiled step; the reference comes first."""
    reference = ({"loss": 2.0, "tokens": 64.0}, {"a": np.array([4.0, 3.0]), "b": np.array([1e-9])})

    def answer_with(*layouts):
        answers = iter([reference, *layouts])
        monkeypatch.setattr(verify, "run_layout", lambda *arguments: next(answers))
        monkeypatch.setattr(verify, "init_params", lambda config, layout: {})
        monkeypatch.setattr(verify, "prepare_devices", lambda device: None)

    return answer_with


def layout_with(loss=2.0, tokens=64.0, a=(4.0, 3.0), b=1e-9):
    return {"loss": loss, "tokens": tokens}, {"a": np.array(a), "b": np.array([b])}


@pytest.mark.parametrize(
    ("layout", "figure", "value", "equal"),
    [
        (layout_with(), "gradient", 0.0, True),
        (layout_with(loss=2.0 * (1 + 9e-6)), "loss", 9e-6, True),
        (layout_with(loss=2.0 * (1 + 2e-5)), "loss", 2e-5, False),
        (layout_with(tokens=65.0), "metrics", 1 / 64, False),
        (layout_with(a=(4.0, 3.0002)), "gradient", 0.0002 / 4, True),
        (layout_with(a=(4.0, 3.001)), "gradient", 0.001 / 4, False),
        (layout_with(a=(-4.0, -3.0)), "gradient", 2.0, False),
        (layout_with(b=1.01e-9), "gradient", 1e-11 / (1e-6 * 5), True),  # tiny leaf: to the norm
        (layout_with(b=1e-3), "gradient", 1e-3 / (1e-6 * 5), False),
    ],
)
def test_a_difference_is_measured_and_judged(small_config, fake, layout, figure, value, equal):
    fake(layout)
    (found,) = verify.compare(small_config, ["mesh.data=2"])
    assert getattr(found, figure) == pytest.approx(value, rel=1e-3, abs=1e-12)
    assert found.equal == equal
    assert found.layout == "mesh.data=2"


def test_the_worst_leaf_is_named_and_not_a_number_is_the_worst_of_all(small_config, fake):
    fake(layout_with(b=1e-3), layout_with(a=(5.0, 3.0)), layout_with(a=(9.0, 3.0), b=np.nan))
    found = list(verify.compare(small_config, ["mesh.data=2", "mesh.data=4", "mesh.data=8"]))
    assert [comparison.leaf for comparison in found] == ["b", "a", "b"]
    assert not any(comparison.equal for comparison in found)


def test_a_mismatch_is_printed_and_exits_1(small_config, fake, tmp_path, capsys):
    layouts = tmp_path / "layouts"
    layouts.write_text("mesh.data=2\nmesh.data=4\nmesh.data=8\n")
    fake(layout_with(), layout_with(a=(4.0, 4.0)), layout_with(loss=np.nan))
    config = tmp_path / "small.yaml"
    config.write_text(to_yaml(small_config), encoding="utf-8")
    assert main(["verify", str(config), "--layouts", str(layouts)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert [line[:7] for line in printed[-4:-1]] == ["equal  ", "DIFFERS", "DIFFERS"]
    assert printed[-1] == "1 of 3 layouts equal one device"


def test_a_layouts_file_is_a_layout_a_line(tmp_path):
    path = tmp_path / "layouts"
    lines = "# all data", "mesh.data=8", "  mesh.fsdp=2 layout.zero=1 # ZeRO-1", "run.name=a#b", ""
    path.write_text("\n".join(lines))
    assert read_layouts(path) == ["mesh.data=8", "mesh.fsdp=2 layout.zero=1", "run.name=a#b"]


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"# nothing\n"])
def test_a_layouts_file_without_layouts(small_config, tmp_path, content):
    path = tmp_path / "layouts"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match="layouts: ") as caught:
        verify.verify(small_config, path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("mesh.tensr=2", "mesh.tensr: no such key; did you mean mesh.tensor?"),
        ("mesh.tensor=8", "model.heads=4 is not a multiple of mesh.tensor=8"),
        ("data=8 fsdp", "an override is written key=value"),
    ],
)
def test_an_impossible_layout_is_an_error_not_a_mismatch(small_config, fake, layout, message):
    fake()
    with pytest.raises(ValueError, match=message):
        list(verify.compare(small_config, [layout]))


def test_pipelines_that_a_model_is_too_small_for_are_named(small_config, capsys):
    assert possible_pipelines(override(small_config, "model.layers=16")) == list(PIPELINES)
    assert not capsys.readouterr().out
    shallow = possible_pipelines(override(small_config, "model.layers=3"))
    assert shallow == [layout for layout in PIPELINES if "zb_h2" in layout]
    first, *rest = capsys.readouterr().out.splitlines()
    assert len(rest) == len(PIPELINES) - 2
    assert first == (
        f"left out: layout `{PIPELINES[1]}`: model.layers=3 on mesh.pipe=2, 4 pieces in all, "
        "leaves some without any; write at least 4"
    )


def test_the_cover_meets_every_possible_pair(small_config):
    small_config = override(small_config, "model.layers=4")  # enough for two chunks on two stages
    reference = override(small_config, *REFERENCE)
    cover = pairwise_cover(small_config)
    assert cover == pairwise_cover(small_config)
    assert len(set(cover)) == len(cover) < 50
    defaults = {key: f"{key}={values[0]}" for key, values in CHOICES.items()}
    met = set()
    for layout in cover:
        override(reference, *layout.split())  # no error: it is possible
        chosen = defaults | {part.partition("=")[0]: part for part in layout.split()}
        assert list(chosen) == list(CHOICES)
        sizes = [int(chosen[key].split("=")[1]) for key in chosen if key.startswith("mesh.")]
        assert 1 < np.prod(sizes) <= jax.device_count()
        met |= set(combinations(chosen.values(), 2))
    choices = [[f"{key}={value}" for value in values] for key, values in CHOICES.items()]
    pairs = {pair for two in combinations(choices, 2) for pair in product(*two)}
    large = {  # sixteen devices and more
        ("mesh.fsdp=4", "mesh.tensor=4"),
        ("mesh.fsdp=4", "mesh.context=4"),
        ("mesh.context=4", "mesh.tensor=4"),
        *((f"mesh.{axis}", "mesh.context=8") for axis in ("data=2", "fsdp=2", "fsdp=4")),
        *((f"mesh.pipe={size}", "mesh.context=8") for size in (2, 4)),
        *(("mesh.pipe=4", f"mesh.{axis}=4") for axis in ("fsdp", "context", "tensor")),
        *(("mesh.context=8", f"layout.schedule={name}") for name in CHOICES["layout.schedule"][1:]),
        *(("mesh.context=8", f"mesh.tensor={size}") for size in (2, 4)),
    }
    unread = {
        *(("mesh.context=1", f"layout.context={mode}") for mode in CHOICES["layout.context"][1:]),
        *(("mesh.pipe=1", f"layout.schedule={name}") for name in CHOICES["layout.schedule"][1:]),
    }
    refused = {
        ("layout.sequence_parallel=false", "layout.overlap=ring"),
        ("mesh.context=8", "layout.context=ulysses"),  # of four heads
        *(("mesh.tensor=4", f"layout.context={mode}") for mode in ("ulysses", "usp")),
        ("layout.schedule=interleaved", "train.microbatches=1"),  # less than the stages
        ("mesh.pipe=4", "layout.schedule=interleaved"),  # of four layers
        ("layout.context=zigzag", "layout.schedule=zb_h1"),  # a ring in a branch
    }
    assert pairs - met == large | unread | refused


def test_the_cover_leaves_out_what_a_config_cannot_do(small_config):
    """Three rows: no data parallelism by two, no micro-batches."""
    cover = pairwise_cover(override(small_config, *REFERENCE, "train.batch_size=3"))
    assert cover
    for layout in cover:
        assert not {"mesh.data=2", "mesh.fsdp=2", "train.microbatches=2"} & set(layout.split())
    odd = override(small_config, *REFERENCE, "train.batch_size=3", "train.seq_len=15")
    cut = [layout for layout in pairwise_cover(odd) if "mesh.tensor" in layout]
    assert cut and all("layout.sequence_parallel=false" in layout for layout in cut)


def test_any_config_becomes_a_one_device_reference(small_config):
    config = override(
        small_config,
        *("layout.zero=2", "precision.compute=bf16", "train.microbatches=4", "remat.policy=full"),
        "train.eval_batch_size=8",
    )
    reference = override(config, *REFERENCE)
    assert set(reference.mesh.sizes().values()) == {1}
    assert reference.precision.compute == "f32"
    assert (reference.layout.zero, reference.remat.policy) == (3, "none")
    assert (reference.train.microbatches, reference.train.batch_size) == (1, 16)


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.halt_on_nan=true",),
        ("precision.reduce=bf16",),
        ("precision.compute=f16", "precision.loss_scale=megatron", "precision.first_scale=8"),
    ],
)
def test_whatever_its_precision_a_config_is_verified_in_f32(small_config, overrides):
    reference = override(override(small_config, *overrides), *REFERENCE)
    assert reference.precision == PrecisionConfig()
    assert not reference.train.halt_on_nan


def test_the_batch_is_hard(small_config):
    batch = synthetic_batch(small_config)
    arrays = {field.name: np.asarray(getattr(batch, field.name)) for field in fields(batch)}
    assert {array.shape for array in arrays.values()} == {(1, 16, 16)}
    weights, segments = arrays["weights"][0], arrays["segments"][0]
    assert set(np.unique(weights)) == {0.0, 1.0}
    assert not weights[0].any()  # a row of padding
    assert (segments[0] < 0).all()
    assert (segments[1:] >= 0).all()
    assert not weights[9:].any()  # the second of two data shards has no target in most rows
    counts = weights[1:9].sum(axis=1)
    assert len(set(counts)) > 2
    assert (segments[1:].max(axis=1) > 0).any()  # packed rows
    assert arrays["tokens"].max() < 257
    starts = np.diff(segments[1:], axis=1, prepend=-1) > 0
    assert not arrays["positions"][0][1:][starts].any()
    assert (np.diff(arrays["positions"][0][1:], axis=1)[~starts[:, 1:]] == 1).all()


def test_the_batch_is_a_function_of_the_seed(small_config):
    first, again = synthetic_batch(small_config), synthetic_batch(small_config)
    other = synthetic_batch(override(small_config, "run.seed=1"))
    assert np.array_equal(first.tokens, again.tokens)
    assert not np.array_equal(first.tokens, other.tokens)


@pytest.mark.parametrize("figure", ["metrics", "gradient"])
def test_not_a_number_is_never_equal(figure):
    figures = {"loss": 0.0, "metrics": 0.0, "norm": 0.0, "gradient": 0.0} | {figure: float("nan")}
    assert not Comparison(layout="mesh.data=2", leaf="embed", **figures).equal


def test_the_verify_batch_always_has_targets(small_config):
    batch = verify.synthetic_batch(override(small_config, *REFERENCE, "train.batch_size=1"))
    assert batch.weights.sum() > 0


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ("mesh.data=-1", "write every mesh axis as a number"),
        ("mesh.data=16", "it needs 16 devices, but there are 8"),
        ("mesh.tensr=2", "no such key"),
    ],
)
def test_an_impossible_line_of_a_layouts_file_is_named(small_config, layout, why):
    reference = override(small_config, *REFERENCE)
    with pytest.raises(ValueError, match=f"layout `{layout}`: .*{why}"):
        verify.layout_config(reference, layout)


def test_a_comment_in_a_layouts_file_begins_after_a_blank(tmp_path):
    """Inside a word, # is part of it, as in what follows the equals sign everywhere else."""
    (tmp_path / "layouts").write_text(
        "# all\nmesh.data=2 # the rows\n\nrun.name=exp#3\tmesh.fsdp=2\t# both\n  #\n"
    )
    layouts = verify.read_layouts(tmp_path / "layouts")
    assert layouts == ["mesh.data=2", "run.name=exp#3\tmesh.fsdp=2"]
    assert verify.layout_config(override(Config(), *REFERENCE), layouts[1]).run.name == "exp#3"


def test_all_layouts_are_checked_before_the_first_is_compiled(small_config, tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(
        verify,
        "run_layout",
        lambda *arguments: compiled.append(1) or ({"loss": 1.0}, {"a": np.ones(2)}),
    )
    monkeypatch.setattr(verify, "init_params", lambda *arguments: SimpleNamespace())
    (tmp_path / "layouts").write_text("mesh.data=2\nmesh.tensr=2\n")
    with pytest.raises(ValueError, match="tensr"):
        verify.verify(small_config, tmp_path / "layouts")
    assert not compiled
