"""A run's tokenizer and documents belong to it: what generates, evaluates, resumes or starts from
it reads them there, and refuses others.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from meshwright.trainer.checkpoint.manifest import (
    DamagedError,
    find_checkpoints,
    read_tokenizer_text,
)
from meshwright.trainer.config.load import override
from meshwright.trainer.data import store as store_module
from meshwright.trainer.data.store import build_store, open_store, read_description
from meshwright.trainer.data.tokenizer import BpeTokenizer, read_tokenizer, tokenizer_digest
from meshwright.trainer.evaluate import evaluate_run
from meshwright.trainer.generate import generate_run
from meshwright.trainer.loop import train

WORDS = ["alpha", "beta", "gamma", "delta", "wörd", "epsilon", "zeta", "eta", "theta"]
GREEDY = {"tokens": 4, "temperature": 0}


def write_corpus(folder: Path, seed: int, words=WORDS) -> None:
    folder.mkdir()
    rng = np.random.default_rng(seed)
    for number in range(40):
        text = " ".join(rng.choice(words, rng.integers(5, 60)))
        (folder / f"{number:02}.txt").write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def bpe(small_config, tmp_path_factory):
    """A finished run whose tokenizer was trained on its corpus, on one device."""
    folder = tmp_path_factory.mktemp("bpe")
    write_corpus(folder / "corpus", 0)
    config = override(
        small_config,
        *(f"run.dir={folder}/runs", "run.name=first", "checkpoint.every=3", "checkpoint.keep=2"),
        *("data.source=text", f"data.paths=[{folder}/corpus/*.txt]", "data.holdout=0.2"),
        *("data.tokenizer=bpe", "model.vocab_size=300", f"data.store={folder}/store"),
        *("optimizer.warmup=2", "optimizer.lr=0.02"),
    )
    return SimpleNamespace(folder=folder, config=config, result=train(config))


@pytest.fixture
def copy(bpe, tmp_path):
    """The run alone, away from its documents and its store, which are gone."""
    shutil.copytree(bpe.folder / "runs" / "first", tmp_path / "runs" / "first")
    data = tmp_path / "runs" / "first" / "data.json"
    trained_on = json.loads(data.read_text()) | {"store": str(tmp_path / "gone")}
    data.write_text(json.dumps(trained_on))
    return tmp_path / "runs" / "first"


def digest_of(store: Path) -> str:
    return read_description(store).tokenizer_digest


def digest_of_run(folder: Path) -> str:
    return tokenizer_digest((folder / "tokenizer.json").read_text(encoding="utf-8"))


def new_training(monkeypatch) -> None:
    """From here on no tokenizer may be trained."""
    monkeypatch.setattr(store_module, "train_bpe", lambda *_: pytest.fail("trained a tokenizer"))


def test_the_tokenizer_is_in_the_run_folder_and_in_each_checkpoint(bpe):
    run = bpe.result.folder
    digest = digest_of(bpe.folder / "store")
    assert digest_of_run(run) == digest
    assert list(find_checkpoints(run)) == [3, 6]
    for checkpoint in find_checkpoints(run).values():
        assert tokenizer_digest(read_tokenizer_text(checkpoint)) == digest


def test_generation_needs_nothing_but_the_checkpoint(bpe, copy, tmp_path, monkeypatch):
    """From any directory, without documents or store, and without the run around it."""
    texts = generate_run(bpe.result.folder, ["alpha "], **GREEDY)
    monkeypatch.chdir(tmp_path)
    new_training(monkeypatch)
    assert generate_run(copy, ["alpha "], **GREEDY) == texts
    alone = tmp_path / "6"
    (copy / "checkpoints" / "6").rename(alone)
    shutil.rmtree(copy)
    assert generate_run(alone, ["alpha "], **GREEDY) == texts


def test_evaluation_reads_the_store_of_the_run_though_its_documents_change(bpe, monkeypatch):
    line = evaluate_run(bpe.result.folder)
    assert f"held-out loss {bpe.result.history[-1]['eval_loss']:.4f}" in line
    new_training(monkeypatch)
    more = bpe.folder / "corpus" / "more.txt"
    more.write_text("omega " * 50)
    try:
        assert evaluate_run(bpe.result.folder) == line
    finally:
        more.unlink()


def test_evaluation_without_the_documents_says_where_it_looked(bpe, copy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new_training(monkeypatch)
    config = (copy / "config.yaml").read_text()
    config = config.replace(f"{bpe.folder}/corpus", "corpus").replace(
        f"{bpe.folder}/store", "store"
    )
    (copy / "config.yaml").write_text(config)
    with pytest.raises(ValueError) as caught:
        evaluate_run(copy)
    looked = str(tmp_path / "gone"), "data.paths=[corpus/*.txt] matches no file", str(tmp_path)
    assert all(place in str(caught.value) for place in looked)
    assert "\n" not in str(caught.value)
    write_corpus(tmp_path / "elsewhere", 1)
    assert "held-out loss" in evaluate_run(copy, ["data.paths=[elsewhere/*.txt]"])
    assert digest_of(tmp_path / "store") == digest_of_run(copy)


def test_documents_made_again_are_those_of_the_run_or_refused(bpe, copy, tmp_path, monkeypatch):
    """With the tokenizer of the run: one trained on other documents would mean other ids."""
    new_training(monkeypatch)
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace(f"{bpe.folder}/store", f"{tmp_path}/again"))
    assert f"held-out loss {bpe.result.history[-1]['eval_loss']:.4f}" in evaluate_run(copy)
    assert digest_of(tmp_path / "again") == digest_of_run(copy)

    shutil.rmtree(tmp_path / "again")
    more = bpe.folder / "corpus" / "more.txt"
    more.write_text("omega " * 50)
    try:
        with pytest.raises(ValueError) as caught:
            evaluate_run(copy)
    finally:
        more.unlink()
    said = f"{tmp_path}/gone is gone", f"now in {tmp_path}/again, are others", str(Path.cwd())
    assert all(part in str(caught.value) for part in said)


def test_evaluation_takes_a_store_that_moved_and_nothing_else_unasked(bpe, copy, tmp_path):
    """data.store says where the run's tokens are; how many are read ahead says nothing at all."""
    line = f"held-out loss {bpe.result.history[-1]['eval_loss']:.4f}"
    moved = tmp_path / "moved"
    shutil.copytree(bpe.folder / "store", moved)
    config = (copy / "config.yaml").read_text().replace(f"{bpe.folder}/", f"{tmp_path}/not-here/")
    (copy / "config.yaml").write_text(config)
    assert line in evaluate_run(copy, [f"data.store={moved}"])
    with pytest.raises(ValueError, match="is not found from .* is gone, and .* matches no file"):
        evaluate_run(copy, ["data.prefetch=0"])
    store = ["data.source=store", f"data.store={moved}", "data.paths=[]"]  # the cure it names
    assert line in evaluate_run(copy, store)
    alone = tmp_path / "6"
    (copy / "checkpoints" / "6").rename(alone)
    with pytest.raises(ValueError, match=r"data\.json is missing .*; write data\.store=…"):
        evaluate_run(alone)
    assert line in evaluate_run(alone, store)
    more = {"data={holdout: 0.5}", f"data.store={tmp_path}/half"}
    held_out = evaluate_run(bpe.result.folder, sorted(more))
    assert "held-out loss" in held_out and line not in held_out


def test_a_new_run_from_its_parameters_takes_its_tokenizer(bpe, tmp_path, monkeypatch, capsys):
    """On other documents, which would give other merges; and what it leaves is whole again."""
    write_corpus(tmp_path / "corpus", 5, ["omega", "psi", "chi", "alpha", "beta"])
    settings = (
        *(f"run.dir={tmp_path}/runs", "run.name=second", f"data.store={tmp_path}/store"),
        *(f"data.paths=[{tmp_path}/corpus/*.txt]", "train.steps=2", "checkpoint.every=0"),
    )
    tuned = override(
        bpe.config, *settings, f"checkpoint.init_from={bpe.result.folder}/checkpoints/6"
    )
    new_training(monkeypatch)
    folder = train(tuned).folder
    assert (
        digest_of(tmp_path / "store") == digest_of_run(folder) == digest_of_run(bpe.result.folder)
    )
    assert generate_run(folder, ["alpha"], tokens=2)
    resumed = train(override(tuned, "train.steps=3", "checkpoint.resume=auto"))
    assert resumed.history[-1]["step"] == 3
    with pytest.raises(ValueError, match=r"data\.tokenizer=byte, but .* write data\.tokenizer=bpe"):
        train(override(tuned, "data.tokenizer=byte", "run.name=third"))


def test_a_store_of_another_tokenizer_is_refused_by_digest(bpe, tmp_path):
    write_corpus(tmp_path / "corpus", 5, ["omega", "psi", "chi"])
    other = override(
        bpe.config, f"data.paths=[{tmp_path}/corpus/*.txt]", f"data.store={tmp_path}/store"
    )
    assert isinstance(open_store(build_store(other)).tokenizer, BpeTokenizer)
    ours, theirs = digest_of_run(bpe.result.folder), digest_of(tmp_path / "store")
    assert ours != theirs
    message = rf"a tokenizer of digest {theirs[:12]}, but .* of digest {ours[:12]}; write another"
    tuned = override(
        other,
        *(f"run.dir={tmp_path}", "run.name=tuned"),
        f"checkpoint.init_from={bpe.result.folder}",
    )
    as_it_is = "data.source=store", "data.paths=[]", f"data.store={tmp_path}/store"
    for config in (tuned, override(tuned, *as_it_is)):
        with pytest.raises(ValueError, match=message):
            train(config)
    assert not (tmp_path / "tuned").exists()
    with pytest.raises(ValueError, match=message):
        evaluate_run(bpe.result.folder, as_it_is)
    tokenizer = read_tokenizer((bpe.result.folder / "tokenizer.json").read_text(), "a run")
    for config in (tuned, override(tuned, *as_it_is)):  # as meshwright tokenize does
        with pytest.raises(ValueError, match=message):
            build_store(config, tokenizer)


def test_a_resumed_run_makes_a_lost_store_again_with_its_tokenizer(
    bpe, copy, tmp_path, monkeypatch
):
    new_training(monkeypatch)
    config = override(
        bpe.config,
        *(f"run.dir={copy.parent}", "checkpoint.resume=must", f"data.store={tmp_path}/again"),
        "train.steps=7",
    )
    result = train(config)
    assert result.history[-1]["step"] == 7
    assert digest_of(tmp_path / "again") == digest_of_run(copy)


def test_a_damaged_tokenizer_is_named_and_an_older_one_taken(copy):
    file = copy / "checkpoints" / "6" / "tokenizer" / "metadata"
    good = file.read_text()
    for damage in ("", "{", good.replace("alpha", "alphb", 1), "[" * 100_000):
        assert damage != good
        file.write_text(damage)
        with pytest.raises(DamagedError) as caught:
            generate_run(copy, ["alpha"], tokens=1)
        assert str(caught.value).startswith(
            f"{file} is damaged or missing; checkpoint.fallback=true goes"
        )
    assert generate_run(copy, ["alpha"], ["checkpoint.fallback=true"], tokens=1)
    file.write_text(good)
    shutil.rmtree(copy / "checkpoints" / "6" / "state" / "d")
    with pytest.raises(DamagedError, match=r"checkpoints/6 .*checkpoint\.fallback=true"):
        evaluate_run(copy)
    assert "held-out loss" in evaluate_run(copy, ["checkpoint.fallback=true"])
