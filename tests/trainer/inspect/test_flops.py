"""Model FLOPs by hand, and the utilisation they give."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from meshwright.trainer.config import Config
from meshwright.trainer.config.load import override
from meshwright.trainer.inspect.flops import PEAK_BF16_FLOPS, mfu, peak_flops, step_flops

HAND = (
    *("model.vocab_size=300", "model.layers=3", "model.d_model=8", "model.heads=4"),
    *("model.kv_heads=2", "model.head_dim=6", "model.d_ff=20"),
    *("train.batch_size=5", "train.seq_len=16"),
)


def config(*overrides: str) -> Config:
    return override(Config(), *HAND, *overrides)


def by_hand(window: int) -> int:
    """Forward and backward of every matmul of a row, counted one by one."""
    tokens, d, heads, kv, size, ff, vocab, layers = 16, 8, 4, 2, 6, 20, 300, 3
    projections = d * heads * size + 2 * d * kv * size + heads * size * d  # q, k and v, o
    per_token = 2 * (layers * (projections + d * ff + d * ff + ff * d) + d * vocab)
    visible = sum(min(position + 1, window) for position in range(tokens))
    per_pair = layers * heads * (2 * size + 2 * size)  # query·key, then probability·value
    return 3 * 5 * (tokens * per_token + visible * per_pair)


@pytest.mark.parametrize("window", [1, 5, 15, 16])
def test_a_window_is_counted_exactly(window):
    assert step_flops(config(f"model.window={window}")) == by_hand(window)


@pytest.mark.parametrize("overrides", [(), ("model.window=17",), ("model.window=1000",)])
def test_causal_attention_is_counted_half(overrides):
    assert step_flops(config(*overrides)) == by_hand(window=16)


@pytest.mark.parametrize(
    "same", ["remat.policy=full", "train.microbatches=5", "model.tie_embeddings=true"]
)
def test_how_a_step_is_computed_changes_nothing(same):
    assert step_flops(config(same)) == step_flops(config())


def test_flops_grow_with_the_batch():
    assert step_flops(config("train.batch_size=10")) == 2 * step_flops(config())


def test_the_peak_is_the_config_s_or_the_device_s(monkeypatch):
    assert peak_flops(config()) is None  # a CPU has no peak worth naming
    assert peak_flops(config("device.peak_flops=2e12")) == 2e12
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="TPU v5 lite")])
    assert peak_flops(config()) == PEAK_BF16_FLOPS["TPU v5 lite"]
    assert peak_flops(config("device.peak_flops=2e12")) == 2e12


def test_mfu_is_the_share_of_all_devices():
    assert mfu(6e12, seconds=2.0, devices=4, peak=1e12) == 0.75
    assert mfu(6e12, seconds=2.0, devices=4, peak=None) is None


def test_of_experts_those_a_token_meets_are_counted():
    experts = (
        "model.moe.experts=16",
        "model.moe.experts_per_token=3",
        "model.moe.shared_experts=1",
    )
    sparse = config(*experts, "model.moe.d_ff=5")
    router = 3 * 2 * 3 * 8 * 16 * 5 * 16  # forward and backward, layers, d x E, tokens
    assert step_flops(sparse) == step_flops(config()) + router
