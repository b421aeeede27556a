from pathlib import Path

import numpy as np
import pytest

from meshwright.models.config import ModelConfig
from meshwright.trainer.config import Config, DataConfig, TrainConfig
from meshwright.trainer.data.store import Split

END_OF_TEXT = 256


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """No test touches the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def corpus(tmp_path):
    """A folder of 30 text files of different lengths, some in a subfolder, one empty."""
    folder = tmp_path / "corpus"
    (folder / "deeper").mkdir(parents=True)
    for i in range(30):
        place = folder / "deeper" if i % 3 == 0 else folder
        (place / f"{i:02}.txt").write_text(f"document {i}: " + "wörd " * i)
    (folder / "empty.txt").write_text("")
    return folder


@pytest.fixture
def make_config(corpus):
    """Config on the corpus with the given data settings; rows of 8 tokens."""

    def make(*, vocab_size: int = 257, seq_len: int = 8, **data) -> Config:
        settings = {"source": "text", "paths": [f"{corpus}/**/*.txt"], "holdout": 0.3} | data
        return Config(
            data=DataConfig(**settings),
            model=ModelConfig(vocab_size=vocab_size),
            train=TrainConfig(seq_len=seq_len),
        )

    return make


@pytest.fixture(scope="session")
def make_split():
    """A split in memory from the token counts of its documents, end-of-text not counted."""

    def make(lengths: list[int]) -> Split:
        ids = np.random.default_rng(0).integers(0, END_OF_TEXT, sum(lengths))
        ends = np.cumsum(lengths)
        tokens = np.insert(ids, ends, END_OF_TEXT).astype("<u2")
        offsets = np.concatenate([[0], ends + np.arange(1, len(lengths) + 1)])
        return Split(Path("train.tokens"), tokens, offsets, END_OF_TEXT, END_OF_TEXT)

    return make
