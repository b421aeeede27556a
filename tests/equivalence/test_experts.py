"""Mixtures of experts: against the plain model, against one device in every way of sharing experts
out, and the cases."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

from meshwright.trainer import verify
from runs import (
    SGD,
    SMALL,
    assert_same_gradients,
    assert_same_metrics,
    gradients,
    make_config,
    reference_gradients,
    train,
)

MOE = (*SMALL, "model.experts=8", "model.balance_loss=0.1", "model.router_z_loss=0.05")
CAPACITY = ("model.capacity=1.0", "model.routing_group=4")
KINDS = {
    "Switch": ("model.experts_per_token=1", "model.normalize_gates=false", *CAPACITY),
    "GShard, a micro-batch in balance": (
        "model.balance=microbatch",
        "model.overflow=probability",
        "train.microbatches=2",
        *CAPACITY,
    ),
    "Mixtral": (),
    "DeepSeek": (
        "model.router_scores=sigmoid",
        "model.experts_per_token=3",
        "model.expert_groups=4",
        "model.groups_per_token=2",
        "model.gate_scale=2.5",
        "model.shared_experts=2",
        "model.dense_layers=1",
        "model.expert_d_ff=8",
        "remat.policy=full",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_router_equals_the_plain_model(kind):
    """Loss, objective and every gradient leaf."""
    overrides = (*MOE, *KINDS[kind])
    metrics, grads = gradients(*overrides)
    expected, expected_grads = reference_gradients(*overrides)
    objective = sum(metrics[name] for name in ("loss", "balance_loss", "router_z_loss"))
    assert_allclose(
        [metrics["loss"], objective], [expected["loss"], expected["objective"]], rtol=1e-5
    )
    assert_same_gradients(grads, expected_grads)
    assert bool(np.sum(metrics.get("dropped", 0))) == ("model.capacity=1.0" in overrides)


TOP1, GSHARD, MIXTRAL, DEEPSEEK = KINDS.values()
ALL = ("model.experts_per_token=8",)
NO_SEQUENCE = "layout.sequence_parallel=false"
SMALL_GROUPS = ("model.capacity=0.75", "model.routing_group=2", "model.balance=microbatch")


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (MIXTRAL, "mesh.expert=8"),
        (TOP1, "mesh.fsdp=2 mesh.expert=2 mesh.tensor=2 layout.zero=1"),
        ((*GSHARD, "model.random_second=true"), "mesh.data=2 mesh.expert=4 layout.zero=2"),
        (ALL, "mesh.context=4 mesh.tensor=2 layout.experts=[context,tensor]"),
        (SMALL_GROUPS, "mesh.context=4 layout.context=zigzag layout.experts=[context]"),
        (DEEPSEEK, "mesh.expert=2 mesh.context=2 mesh.tensor=2 layout.experts=[context,expert]"),
        (
            MIXTRAL,
            f"mesh.fsdp=2 mesh.tensor=4 {NO_SEQUENCE} layout.experts=[tensor]",
        ),
        pytest.param(
            MIXTRAL,
            f"mesh.fsdp=4 mesh.tensor=2 {NO_SEQUENCE} layout.experts=[fsdp]",
            marks=pytest.mark.slow,
        ),
        (
            (*GSHARD, "model.random_second=true", "train.dropout=0.1", "model.layers=3"),
            "mesh.pipe=2 mesh.context=2 mesh.tensor=2 layout.experts=[context,tensor]",
        ),
    ],
)
def test_every_way_to_share_experts_out_equals_one_device(kind, layout):
    """Loss, all metrics, every gradient leaf (C22, C33)."""
    metrics, grads = gradients(*MOE, *kind, *layout.split())
    expected, expected_grads = gradients(*MOE, *kind)
    assert_same_metrics(metrics, expected)
    assert_same_gradients(grads, expected_grads)
    assert metrics["expert_rounds"] > 0


def test_stages_hold_layers_that_are_alike():
    with pytest.raises(ValueError) as error:
        make_config(*MOE, "model.dense_layers=1", "mesh.pipe=2")
    assert str(error.value) == (
        "model.dense_layers=1: the stages of mesh.pipe=2 hold layers that are alike; "
        "write model.dense_layers=0"
    )


def test_a_dense_model_shares_no_experts_out():
    with pytest.raises(ValueError) as error:
        make_config(*SMALL, "layout.experts=[context]")
    assert str(error.value) == (
        "layout.experts=[context] is not read by a model without experts; "
        "write model.experts=8 or leave it out"
    )


def test_unlimited_capacity_equals_dropless():
    unlimited = ("model.capacity=8.0", "model.routing_group=4")
    metrics, grads = gradients(*MOE, *unlimited, "mesh.expert=2")
    expected, expected_grads = gradients(*MOE)
    assert metrics.pop("dropped") == [0, 0]
    assert_same_metrics(metrics, {name: expected[name] for name in metrics})
    assert_same_gradients(grads, expected_grads)


def test_the_bias_of_routers_is_the_same_on_any_mesh():
    """Bits: it follows from integers. Recomputation counts nothing twice."""
    options = (*MOE, *SGD, "optimizer.lr=0.01", "model.balance_bias=0.01")
    _, state = train(3, *options, "remat.policy=full", "mesh.expert=2", "mesh.tensor=2")
    _, expected = train(3, *options)
    bias = np.asarray(expected.router_bias)
    assert bias.shape == (2, 8) and len(np.unique(bias)) > 2
    np.testing.assert_array_equal(np.asarray(state.router_bias), bias)


def test_verify_meets_experts_in_every_pair():
    layouts = verify.pairwise_cover(make_config(*MOE))
    for choice in ("mesh.expert=2", "mesh.expert=4"):
        for experts in ("layout.experts=[expert,context]", "layout.experts=[context,tensor]"):
            assert any({choice, experts} <= set(layout.split()) for layout in layouts)
    assert not any("layout.overlap" in layout for layout in layouts)
    batch_wide = make_config(*MOE, "model.balance=microbatch")
    assert not any("microbatches" in layout for layout in verify.pairwise_cover(batch_wide))
