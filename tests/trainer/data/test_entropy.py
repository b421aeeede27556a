import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from meshwright.trainer.config import Config
from meshwright.trainer.data import entropy
from meshwright.trainer.data.entropy import bigram_entropy, unigram_entropy
from meshwright.trainer.data.store import open_data


def plain_bigram(split):
    pairs = Counter()
    for start, end in zip(split.offsets[:-1], split.offsets[1:], strict=True):
        document = split.tokens[start:end].tolist()
        pairs.update(zip(document[:-1], document[1:], strict=True))
    firsts = Counter()
    for (first, _), count in pairs.items():
        firsts[first] += count
    total = sum(pairs.values())
    return -sum(n / total * math.log(n / firsts[first]) for (first, _), n in pairs.items())


def test_entropies_equal_plain_counts(make_split, monkeypatch):
    split = make_split([50, 1, 30, 200])
    split.tokens[split.tokens < 256] %= 5
    counts = Counter(split.tokens.tolist())
    total = len(split.tokens)
    unigram = -sum(n / total * math.log(n / total) for n in counts.values())
    for chunk in (7, 50, 2**22):
        monkeypatch.setattr(entropy, "CHUNK", chunk)
        assert unigram_entropy(split) == pytest.approx(unigram, rel=1e-12)
        assert bigram_entropy(split) == pytest.approx(plain_bigram(split), rel=1e-12)


def test_known_entropies(make_split):
    split = make_split([3])
    assert unigram_entropy(split) == pytest.approx(math.log(4), rel=1e-12)
    assert bigram_entropy(split) == pytest.approx(0, abs=1e-12)


def test_bigrams_of_a_large_vocabulary_are_not_counted(make_split):
    split = replace(make_split([30]), largest_token=4096)
    assert bigram_entropy(split) is None
    assert unigram_entropy(split) > 0


def test_standard_library_entropies():
    train = open_data(Config()).train
    assert unigram_entropy(train) == pytest.approx(3.24, abs=0.1)
    assert bigram_entropy(train) == pytest.approx(2.42, abs=0.03)
    assert np.bincount(train.tokens)[256] == len(train.offsets) - 1
