"""A model small enough to compile in seconds, and one whole run of it that several files read; a
start of several processes without any.
"""

from __future__ import annotations

import contextlib
import io
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from meshwright.trainer.config import Config, DeviceConfig, LaunchConfig, launch
from meshwright.trainer.config.load import override
from meshwright.trainer.loop import train
from meshwright.trainer.runtime.processes import start_processes

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


def started_by(platform=None, cpu_devices=None, **settings) -> Config:
    device = DeviceConfig(platform=platform, cpu_devices=cpu_devices)
    return Config(device=device, launch=LaunchConfig(**settings))


@pytest.fixture
def start(monkeypatch):
    """Calls `start_processes` and gives what JAX was to be started with; None: not at all."""

    def start(environ, packages=(), **settings):
        calls = []
        monkeypatch.setattr(jax.distributed, "initialize", lambda **options: calls.append(options))
        monkeypatch.setattr(jax.config, "update", lambda *setting: calls.append(setting))
        monkeypatch.setattr(
            launch.importlib.util, "find_spec", lambda name: name if name in packages else None
        )
        start_processes(started_by(**settings), environ)
        if not calls:
            return None
        preemption, options = calls
        assert preemption == ("jax_enable_preemption_service", False)
        limits = {options.pop(name) for name in list(options) if "timeout" in name}
        assert limits == {int(settings.get("timeout", 300)) + 60}  # ours come first
        return options

    return start
