import json
import resource
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from meshwright.trainer.data import store as store_module
from meshwright.trainer.data.sources import documents, is_held_out
from meshwright.trainer.data.store import build_store, describe_store, open_data, open_store


@contextmanager
def refused(pattern):
    with pytest.raises(ValueError, match=pattern) as error:
        yield
    assert "\n" not in str(error.value)


def split_texts(store, split):
    pieces = [
        split.tokens[start:end]
        for start, end in zip(split.offsets[:-1], split.offsets[1:], strict=True)
    ]
    assert all(piece[-1] == store.tokenizer.end_of_text for piece in pieces)
    return [store.tokenizer.decode(piece) for piece in pieces]


@pytest.mark.parametrize(
    "settings", [{"tokenizer": "byte"}, {"tokenizer": "bpe", "vocab_size": 280}]
)
def test_store_holds_every_document_on_its_side(make_config, settings):
    config = make_config(**settings)
    store = open_data(config)
    wanted = {True: [], False: []}
    for name, text in documents(config.data):
        if text:
            wanted[is_held_out(name, config.data.holdout)].append(text)
    assert split_texts(store, store.train) == wanted[False]
    assert split_texts(store, store.heldout) == wanted[True]
    assert store.tokenizer.vocab_size <= config.model.vocab_size
    assert store.train.largest_token == store.train.tokens.max() < store.tokenizer.vocab_size
    assert store.train.tokens.dtype == np.dtype("<u2")


def test_bpe_learns_from_training_documents_only(make_config, corpus):
    held_out = next(p for p in sorted(corpus.glob("*.txt")) if is_held_out(p.name, 0.3))
    held_out.write_text("zqzqzq" * 500)
    tokenizer = open_data(make_config(tokenizer="bpe", vocab_size=280)).tokenizer
    assert len(tokenizer.encode("zqzqzq")) == 6


def test_store_is_kept_in_the_cache_and_reused(make_config, cache, monkeypatch):
    config = make_config()
    folder = build_store(config)
    assert folder.parent == cache / "meshwright" / "data"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    monkeypatch.setattr(store_module, "_write_store", None)
    assert build_store(config) == folder


def test_another_corpus_or_setting_is_another_store(make_config, corpus):
    folders = [
        build_store(make_config()),
        build_store(make_config(holdout=0.4)),
        build_store(make_config(tokenizer="bpe", vocab_size=270)),
        build_store(make_config(tokenizer="bpe", vocab_size=275)),
        build_store(make_config(paths=[f"{corpus}/*.txt"])),
    ]
    (corpus / "01.txt").write_text("document 1: wörT ")
    folders.append(build_store(make_config()))
    assert len(set(folders)) == len(folders)
    assert build_store(make_config(vocab_size=300)) == folders[-1]


def test_explicit_store_is_written_once_and_refused_for_other_data(make_config, tmp_path, corpus):
    place = str(tmp_path / "a" / "store")
    assert str(build_store(make_config(store=place))) == place
    before = (tmp_path / "a" / "store" / "train.tokens").stat().st_mtime_ns
    assert str(build_store(make_config(store=place))) == place
    assert (tmp_path / "a" / "store" / "train.tokens").stat().st_mtime_ns == before
    with refused(
        r"data\.store=.* was made with data\.holdout=0\.3, not 0\.4; write another data\.store"
    ):
        build_store(make_config(store=place, holdout=0.4))
    with refused(
        r"data\.store=.* was made with data\.tokenizer=byte, not bpe; .* data\.source=store"
    ):
        build_store(make_config(store=place, tokenizer="bpe", vocab_size=300))
    (corpus / "01.txt").write_text("something else")
    with refused(r"data\.store=.* was made from other documents; "):
        build_store(make_config(store=place))
    assert open_data(make_config(source="store", paths=[], store=place)).train.tokens.size


def test_source_store_needs_one(make_config, tmp_path):
    with refused(r"data\.store=.*nope is not a folder; data\.source=store opens"):
        open_data(make_config(source="store", paths=[], store=str(tmp_path / "nope")))
    with refused(r" is not a token store \(no store\.json\)"):
        open_data(make_config(source="store", paths=[], store=str(tmp_path)))


def test_empty_corpora(make_config, tmp_path):
    (tmp_path / "a.txt").write_text("")
    with refused(r"^data\.source=text data\.paths=\[.*a\.txt\]: empty corpus, no document has any"):
        build_store(make_config(paths=[f"{tmp_path}/a.txt"]))


def test_splits_must_both_hold_documents(make_config, cache):
    with refused(r"^data\.holdout=1e-09 holds out none of 30 documents; write a larger share"):
        build_store(make_config(holdout=1e-9))
    with refused(
        r"^data\.holdout=0\.999999 leaves none of 30 documents for training; write a smal"
    ):
        build_store(make_config(holdout=0.999999))
    assert list((cache / "meshwright" / "data").iterdir()) == []


def test_rows_must_fit_the_training_split(make_config):
    tokens = len(open_data(make_config()).train.tokens)
    assert open_data(make_config(seq_len=tokens - 1))
    with refused(rf"^train\.seq_len={tokens} needs {tokens + 1} tokens .* split has {tokens}; "):
        open_data(make_config(seq_len=tokens))


def test_vocabulary_smaller_than_the_tokenizer(make_config):
    """Case C18."""
    folder = str(build_store(make_config()))
    config = make_config(source="store", paths=[], store=folder, vocab_size=256)
    with refused(r"^model\.vocab_size=256 is smaller than the byte tokenizer's .*vocab_size=257$"):
        open_data(config)


def test_token_id_beyond_the_vocabulary(make_config, tmp_path):
    """Case C18."""
    config = make_config(store=str(tmp_path / "store"))
    folder = build_store(config)
    tokens = np.fromfile(folder / "train.tokens", "<u2")
    tokens[3] = 257
    tokens.tofile(folder / "train.tokens")
    description = json.loads((folder / "store.json").read_text())
    description["train"]["largest_token"] = 257
    (folder / "store.json").write_text(json.dumps(description))
    with refused(r"train\.tokens holds token id 257, too large for model\.vocab_size=257; .*=258$"):
        open_data(config)


def truncate(path, share=2):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // share])


def edit(folder, **values):
    description = json.loads((folder / "store.json").read_text())
    (folder / "store.json").write_text(json.dumps(description | values))


def shift_offsets(folder):
    offsets = np.load(folder / "train.offsets.npy")
    offsets[2] = offsets[1]
    np.save(folder / "train.offsets.npy", offsets)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "store.json").unlink(), r"is not a token store \(no store\.json\)"),
        (lambda f: truncate(f / "store.json"), r"store\.json does not describe a token store; "),
        (lambda f: (f / "store.json").write_text("[1]"), r"store\.json does not describe a token"),
        (lambda f: (f / "store.json").write_text("[" * 10**5), r"store\.json does not describe a"),
        (lambda f: (f / "store.json").write_text("9" * 5000), r"store\.json does not describe a"),
        (
            lambda f: edit(f, version=2),
            r"store\.json has version 2, this Meshwright reads 3; delete",
        ),
        (lambda f: edit(f, dtype="<i2"), r"store\.json: dtype: .*; delete"),
        (lambda f: edit(f, train={"documents": 1}), r"store\.json: train\.tokens: .*; delete"),
        (
            lambda f: edit(f, end_of_text=0),
            r"end-of-text \(257, 256\), store\.json says \(257, 0\)",
        ),
        (
            lambda f: edit(f, tokenizer_digest="12"),
            r"tokenizer\.json has digest \w{12}, store\.json",
        ),
        (
            lambda f: (f / "tokenizer.json").unlink(),
            r"tokenizer\.json cannot be read \(.*No such file",
        ),
        (lambda f: truncate(f / "tokenizer.json"), r"tokenizer\.json is not a readable tokenizer"),
        (
            lambda f: truncate(f / "train.tokens"),
            r"train\.tokens has \d+ bytes where store\.json say",
        ),
        (lambda f: (f / "heldout.tokens").unlink(), r"heldout\.tokens is missing; delete"),
        (lambda f: truncate(f / "train.offsets.npy"), r"train\.offsets\.npy is damaged; delete"),
        (lambda f: (f / "train.offsets.npy").write_text(""), r"train\.offsets\.npy is damaged;"),
        (lambda f: (f / "heldout.offsets.npy").unlink(), r"heldout\.offsets\.npy is missing;"),
        (
            shift_offsets,
            r"train\.offsets\.npy does not cut \d+ tokens into \d+ documents, as store",
        ),
        (
            lambda f: np.save(f / "train.offsets.npy", np.arange(5)),
            r"train\.offsets\.npy does not cut \d+ tokens into \d+ documents, as store\.json says",
        ),
    ],
)
def test_damaged_store_names_the_file(make_config, damage, message):
    folder = build_store(make_config())
    damage(folder)
    with refused(message):
        open_store(folder)


def test_killed_writer_leaves_no_store(make_config, tmp_path, corpus):
    folder = tmp_path / "store"
    script = """
import sys, time
from meshwright.trainer.config import Config, DataConfig
from meshwright.trainer.data import store
def slow(config, split_texts=store.split_texts):
    for i, text in enumerate(split_texts(config)):
        if i == 20:
            print("half", flush=True)
            time.sleep(60)
        yield text
store.split_texts = slow
paths, folder = sys.argv[1:]
store.build_store(Config(data=DataConfig(source="text", paths=[paths], holdout=0.3, store=folder)))
"""
    command = [sys.executable, "-c", script, f"{corpus}/**/*.txt", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "half\n"
        writer.kill()
    assert not folder.exists()
    assert open_data(make_config(store=str(folder))).path == folder


def test_two_writers_make_one_store(make_config, cache, monkeypatch):
    both_written = threading.Barrier(2, timeout=10)
    write_files = store_module._write_files

    def write_and_wait(*arguments):
        description = write_files(*arguments)
        both_written.wait()
        return description

    monkeypatch.setattr(store_module, "_write_files", write_and_wait)
    folders = []
    writers = [
        threading.Thread(target=lambda: folders.append(build_store(make_config())))
        for _ in range(2)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(folders) == 2
    assert folders[0] == folders[1]
    assert list((cache / "meshwright" / "data").iterdir()) == [folders[0]]
    open_store(folders[0])


def test_documents_that_change_meanwhile_are_noticed(make_config, corpus, cache, monkeypatch):
    write_files = store_module._write_files

    def write_and_change(*arguments):
        description = write_files(*arguments)
        (corpus / "01.txt").write_text("new")
        return description

    monkeypatch.setattr(store_module, "_write_files", write_and_change)
    with refused("^documents changed while they were tokenised; run again$"):
        build_store(make_config())
    assert list((cache / "meshwright" / "data").iterdir()) == []


def test_disk_errors_name_the_place(make_config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=str(tmp_path / "file")):
        build_store(make_config(store=str(tmp_path / "file" / "store")))
    folder = tmp_path / "full" / "store"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=str(folder)):
            build_store(make_config(store=str(folder)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(folder.parent.iterdir()) == []


def test_description_for_people(make_config):
    store = open_data(make_config())
    lines = describe_store(store).splitlines()
    assert lines[0] == f"store      {store.path}"
    assert lines[1] == "tokenizer  byte, 257 tokens"
    tokens = store.train.tokens.size
    documents = store.description.train.documents
    assert lines[2] == f"train      {documents} documents, {tokens:,} tokens, {2 * tokens:,} bytes"
    assert lines[3].startswith(f"heldout    {30 - documents} documents, ")


def test_nothing_may_be_held_out(make_config):
    """With data.holdout=0; then there is nothing to evaluate on."""
    config = make_config(holdout=0.0)
    store = open_data(config)
    assert store.heldout is None
    assert (
        store.description.train.documents == len(list(documents(config.data))) - 1
    )  # one is empty
    assert describe_store(store).splitlines()[-1] == "heldout    nothing"
    assert sorted(path.name for path in store.path.iterdir()) == [
        *("store.json", "tokenizer.json", "train.offsets.npy", "train.tokens")
    ]
    as_it_is = replace(
        config,
        data=replace(config.data, source="store", paths=[], store=str(store.path)),
        train=replace(config.train, eval_every=5),
    )
    with refused(r"^train\.eval_every=5: .* holds no documents out; write train\.eval_every=0$"):
        open_data(as_it_is)
