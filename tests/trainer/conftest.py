"""A model small enough to compile in seconds, and one whole run of it that several files read."""

from __future__ import annotations

import contextlib
import io
from types import SimpleNamespace

import numpy as np
import pytest

from meshwright.trainer.config import Config
from meshwright.trainer.config.load import override
from meshwright.trainer.loop import train

SMALL = (
    *("model.layers=2", "model.d_model=16", "model.heads=4", "model.kv_heads=2", "model.d_ff=24"),
    *("train.batch_size=16", "train.seq_len=16", "train.steps=6"),
    *("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"),
    *("device.cpu_devices=8", "device.compile_cache=null"),
)


@pytest.fixture(scope="session")
def small_config() -> Config:
    return override(Config(), *SMALL)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Forty text files of words; with data.holdout=0.2 some are held out."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for i in range(40):
        words = rng.choice(["alpha", "beta", "gamma", "delta", "wörd"], rng.integers(5, 60))
        (folder / f"{i:02}.txt").write_text(" ".join(words), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def run(small_config, corpus, tmp_path_factory):
    """A finished run on eight devices: its result, and what it printed where there is no terminal.

    SGD, because Adam would amplify the rounding by which two layouts differ.
    """
    folder = tmp_path_factory.mktemp("run")
    config = override(
        small_config,
        *(f"run.dir={folder}", "run.name=eight"),
        *("data.source=text", f"data.paths=[{corpus}/*.txt]", "data.holdout=0.2"),
        f"data.store={folder}/store",
        *("optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.1", "optimizer.warmup=2"),
        *("train.eval_every=2", "checkpoint.every=3", "checkpoint.keep=2", "log.every=4"),
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        result = train(config)
    return SimpleNamespace(config=config, result=result, folder=result.folder, printed=printed)
