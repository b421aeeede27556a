"""The model on one device against the plain one of `reference.py`: objective, loss and every
gradient leaf, for each option."""

import pytest
from numpy.testing import assert_allclose

from runs import SMALL, assert_same_gradients, gradients, reference_gradients

TOGETHER = {
    "defaults": (),
    "qkv biases, tied, window, z-loss": (
        "model.bias=qkv",
        "model.tie_embeddings=true",
        "model.window=5",
        "train.z_loss=0.01",
    ),
    "all biases, qk norm, softcaps, smoothing": (
        "model.bias=all",
        "model.attention_sink=true",
        "model.qk_norm=head",
        "model.attention_softcap=2.0",
        "model.logit_softcap=3.0",
        "train.label_smoothing=0.1",
    ),
    "one kv head, other sizes, micro-batches, remat": (
        "model.kv_heads=1",
        "model.head_dim=6",
        "model.rope_theta=100.0",
        "model.norm_eps=0.01",
        "train.microbatches=4",
        "remat.policy=full",
    ),
}
ALONE = [option for options in TOGETHER.values() for option in options]


def check(*options):
    overrides = (*SMALL, *options)
    metrics, grads = gradients(*overrides)
    expected, expected_grads = reference_gradients(*overrides)
    objective = sum(metrics.get(name, 0.0) for name in ("loss", "z_loss", "smoothing_loss"))
    assert_allclose(
        [metrics["loss"], objective], [expected["loss"], expected["objective"]], rtol=1e-5
    )
    assert_same_gradients(grads, expected_grads)


@pytest.mark.parametrize("name", TOGETHER)
def test_options_together(name):
    check(*TOGETHER[name])


@pytest.mark.slow
@pytest.mark.parametrize("option", ALONE)
def test_each_option_alone(option):
    check(option)
