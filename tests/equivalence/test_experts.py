"""Mixtures of experts: against the plain model, against one device in every way of sharing experts
out, and the cases."""

import functools
import math
from dataclasses import replace
from functools import partial
from itertools import combinations, product

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose

from meshwright.models.batch import Batch
from meshwright.sharding.layout import specs
from meshwright.trainer.inspect import verify
from meshwright.trainer.inspect.verify import synthetic_batch
from meshwright.trainer.optim.update import clip
from meshwright.trainer.state import abstract_state, lay_out
from meshwright.trainer.step import make_eval_step
from runs import (
    SGD,
    SMALL,
    assert_same_gradients,
    assert_same_metrics,
    gradients,
    layout_gradients,
    make_config,
    place,
    reference_gradients,
    reference_loss_gradients,
    run_steps,
    train,
)

MOE = (*SMALL, "model.moe.experts=8", "model.moe.aux_loss=0.1", "model.moe.z_loss=0.05")
CAPACITY = ("model.moe.capacity_factor=1.0", "model.moe.routing_group=4")
KINDS = {
    "Switch": ("model.moe.experts_per_token=1", "model.moe.normalize_gates=false", *CAPACITY),
    "GShard, a micro-batch in balance": (
        "model.moe.aux_loss_over=microbatch",
        "model.moe.overflow=probability",
        "train.microbatches=2",
        *CAPACITY,
    ),
    "Mixtral": (),
    "DeepSeek": (
        "model.moe.scores=sigmoid",
        "model.moe.experts_per_token=3",
        "model.moe.groups=4",
        "model.moe.groups_per_token=2",
        "model.moe.gate_scale=2.5",
        "model.moe.shared_experts=2",
        "model.dense_layers=1",
        "model.moe.d_ff=8",
        "remat.policy=full",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_router_equals_the_plain_model(kind):
    """Loss, objective and every gradient leaf."""
    overrides = (*MOE, *KINDS[kind])
    metrics, grads = gradients(*overrides)
    expected, expected_grads = reference_gradients(*overrides)
    objective = sum(metrics[name] for name in ("loss", "router_aux_loss", "router_z_loss"))
    assert_allclose(
        [metrics["loss"], objective], [expected["loss"], expected["objective"]], rtol=1e-5
    )
    assert_same_gradients(grads, expected_grads)
    assert bool(np.sum(metrics.get("dropped", 0))) == ("model.moe.capacity_factor=1.0" in overrides)


_, GSHARD, MIXTRAL, DEEPSEEK = KINDS.values()
SMALL_GROUPS = (
    "model.moe.capacity_factor=0.75",
    "model.moe.routing_group=2",
    "model.moe.aux_loss_over=microbatch",
)
SECOND = ("model.moe.second_expert=random",)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ((*GSHARD, *SECOND), "mesh.data=2 mesh.expert=4 layout.zero=2"),
        pytest.param(
            (*GSHARD, *SECOND, "train.dropout=0.1", "model.layers=3"),
            "mesh.pipe=2 mesh.context=2 mesh.tensor=2 layout.experts=[context,tensor]",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            SMALL_GROUPS,
            "mesh.context=4 layout.context=zigzag layout.experts=[context]",
            marks=pytest.mark.slow,
        ),
        (DEEPSEEK, "mesh.expert=2 mesh.context=2 mesh.tensor=2 layout.experts=[context,expert]"),
    ],
)
def test_every_router_shares_its_experts_out(kind, layout):
    assert_equals_one_device(kind, layout)


def assert_equals_one_device(kind, layout):
    """Loss, all metrics, every gradient leaf (C22, C33)."""
    metrics, grads = gradients(*MOE, *kind, *layout.split())
    expected, expected_grads = gradients(*MOE, *kind)
    assert_same_metrics(metrics, expected)
    assert_same_gradients(grads, expected_grads)
    assert (metrics["expert_rounds"] > 0) == (devices_of_experts(layout) > 1)


def devices_of_experts(layout):
    config = make_config(*MOE, *layout.split())
    return math.prod(config.mesh.sizes()[axis] for axis in config.layout.experts)


EIGHT = "mesh.fsdp=2 mesh.context=2 mesh.tensor=2"
WHOLE = "layout.sequence_parallel=false"
COVER = [  # choices of a token, capacity or none, layout
    (2, None, f"{EIGHT} layout.experts=[context,tensor] layout.zero=2"),
    (2, 1.0, f"mesh.fsdp=2 mesh.expert=2 mesh.tensor=2 layout.experts=[tensor] {WHOLE}"),
]
SLOW = [
    (1, None, "mesh.expert=8"),
    (8, None, f"{EIGHT} layout.zero=1 {WHOLE}"),
    (8, 1.0, "mesh.fsdp=4 mesh.expert=2 layout.zero=2"),
    (8, 1.0, f"mesh.context=4 mesh.tensor=2 layout.experts=[context,tensor] {WHOLE}"),
    (1, None, "mesh.fsdp=4 mesh.context=2 layout.experts=[fsdp] layout.zero=0"),
    (1, None, "mesh.fsdp=2 mesh.context=2"),
    (1, None, "mesh.fsdp=2 mesh.expert=4 layout.zero=1"),
    (1, None, f"{EIGHT} layout.experts=[tensor] layout.zero=0 {WHOLE}"),
    (1, None, f"mesh.fsdp=2 mesh.tensor=4 layout.experts=[tensor] layout.zero=2 {WHOLE}"),
    (1, 1.0, "mesh.fsdp=4 mesh.tensor=2 layout.experts=[tensor] layout.zero=1"),
    (2, None, "mesh.fsdp=4 mesh.expert=2 layout.experts=[fsdp,expert] layout.zero=1"),
    (2, None, "mesh.fsdp=4 mesh.tensor=2 layout.zero=2"),
    (2, None, "mesh.data=2 mesh.expert=2 layout.experts=[data,expert]"),
    (2, 1.0, "mesh.fsdp=4 mesh.tensor=2 layout.zero=0"),
    (8, None, "mesh.fsdp=4 mesh.expert=2 layout.experts=[fsdp,expert] layout.zero=0"),
    (8, None, "mesh.fsdp=4 mesh.expert=2 layout.experts=[fsdp,expert] layout.zero=2"),
    (8, 1.0, "mesh.fsdp=2 mesh.expert=4 layout.experts=[fsdp,expert]"),
    (8, 1.0, "mesh.fsdp=2 mesh.tensor=4 layout.experts=[tensor]"),
    (8, None, "mesh.context=2 mesh.tensor=4 layout.experts=[context,tensor]"),
]
VALUES = {
    "choices": (1, 2, 8),
    "capacity": (None, 1.0),
    "devices of experts": (1, 2, 4, 8),
    "folded": (False, True),
    "zero": (0, 1, 2, 3),
    "tensor": ("none", "sequence", "whole"),
    "context": (False, True),
}


@pytest.mark.parametrize(
    ("choices", "capacity", "layout"),
    [*COVER, *(pytest.param(*values, marks=pytest.mark.slow) for values in SLOW)],
)
def test_every_way_to_share_experts_out_equals_one_device(choices, capacity, layout):
    limit = (
        ()
        if capacity is None
        else (f"model.moe.capacity_factor={capacity}", "model.moe.routing_group=4")
    )
    assert_equals_one_device((f"model.moe.experts_per_token={choices}", *limit), layout)


def test_every_two_values_meet_in_the_cover():
    """But that on one device nothing is folded."""
    met = set()
    for choices, capacity, layout in (*COVER, *SLOW):
        config = make_config(*MOE, *layout.split())
        sizes, sequence = config.mesh.sizes(), config.layout.sequence_parallel
        values = {
            "choices": choices,
            "capacity": capacity,
            "devices of experts": devices_of_experts(layout),
            "folded": config.layout.experts != ["expert"],
            "tensor": "none" if sizes["tensor"] == 1 else "sequence" if sequence else "whole",
            "context": sizes["context"] > 1,
        }
        if sizes["fsdp"] > 1:
            values["zero"] = config.layout.zero
        met |= {frozenset(pair) for pair in combinations(values.items(), 2)}
    each = [[(name, value) for value in values] for name, values in VALUES.items()]
    pairs = {frozenset(pair) for two in combinations(each, 2) for pair in product(*two)}
    assert pairs - met == {frozenset({("devices of experts", 1), ("folded", True)})}


def test_a_dense_model_shares_no_experts_out():
    with pytest.raises(ValueError) as error:
        make_config(*SMALL, "layout.experts=[context]")
    assert str(error.value) == (
        "layout.experts=[context] is not read by a model without experts; "
        "write model.moe.experts=8 or leave it out"
    )


BY_PROBABILITY = (
    *("model.moe.experts=16", "model.moe.groups=4", "model.moe.groups_per_token=2"),
    *(
        "model.moe.experts_per_token=3",
        "model.moe.scores=sigmoid",
        "model.moe.overflow=probability",
    ),
    *(
        "model.moe.capacity_factor=1.25",
        "model.moe.routing_group=16",
        "train.seq_len=32",
        "model.layers=4",
    ),
)


def repeating_batch(config):
    """Each row has two tokens of its own, again and again: claims that are all but equal."""
    batch = synthetic_batch(config)
    rows, tokens = batch.tokens.shape[1:]
    own = 8 * np.arange(rows, dtype=np.int32)[:, None] + np.arange(tokens, dtype=np.int32) % 2
    return replace(batch, tokens=own[None])


@functools.cache
def gradients_of_repeats(*layout):
    config = make_config(*SMALL, *BY_PROBABILITY, *layout)
    return layout_gradients(config, repeating_batch(config))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            "mesh.pipe=2 mesh.expert=2 mesh.tensor=2 remat.policy=full", marks=pytest.mark.slow
        ),
        "mesh.fsdp=4 mesh.context=2 layout.experts=[context]",
        pytest.param("model.attention_block=4", marks=pytest.mark.slow),
    ],
)
def test_no_layout_drops_other_tokens_where_claims_are_equal(layout):
    """Were claims compared to their last bit, a gradient would be off by a tenth."""
    metrics, grads = gradients_of_repeats(*layout.split())
    expected, expected_grads = gradients_of_repeats()
    assert min(expected["dropped"]) > 0
    np.testing.assert_array_equal(metrics["dropped"], expected["dropped"])
    assert_same_metrics(metrics, expected)
    assert_same_gradients(grads, expected_grads)


def test_repeats_are_dropped_as_in_the_plain_model():
    config = make_config(*SMALL, *BY_PROBABILITY)
    metrics, grads = gradients_of_repeats()
    expected, expected_grads = reference_loss_gradients(config, repeating_batch(config))
    assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    assert_same_gradients(grads, expected_grads)


def test_unlimited_capacity_equals_dropless():
    unlimited = ("model.moe.capacity_factor=8.0", "model.moe.routing_group=4")
    metrics, grads = gradients(*MOE, *unlimited, "mesh.expert=2")
    expected, expected_grads = gradients(*MOE)
    assert metrics.pop("dropped") == [0, 0]
    assert_same_metrics(metrics, {name: expected[name] for name in metrics})
    assert_same_gradients(grads, expected_grads)


def padded(batch):
    """As many tokens of padding after each row's."""

    def longer(a, fill):
        return np.concatenate([a, np.full_like(a, fill)], axis=-1)

    fills = Batch(tokens=0, targets=0, weights=0, positions=0, segments=-1)
    return jax.tree.map(longer, batch, fills)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(MIXTRAL, marks=pytest.mark.slow),
        (*CAPACITY, "model.moe.aux_loss_over=microbatch"),
    ],
)
def test_padding_changes_nothing_on_any_mesh(kind):
    """The second of two devices along context holds padding alone."""
    batch = padded(synthetic_batch(make_config(*MOE)))
    mesh = "mesh.expert=2", "mesh.context=2", "mesh.tensor=2", "layout.experts=[expert,context]"
    metrics, grads = layout_gradients(make_config(*MOE, *kind, *mesh, "train.seq_len=32"), batch)
    expected, expected_grads = gradients(*MOE, *kind)
    assert_same_metrics(metrics, expected)
    assert_same_gradients(grads, expected_grads)


def skewed_batch(config):
    """Each half of each row has eight tokens of its own: devices' routers choose differently."""
    batch = synthetic_batch(config)
    rows, tokens = batch.tokens.shape[1:]
    half = (np.arange(tokens) >= tokens // 2).astype(np.int32)
    own = 16 * np.arange(rows, dtype=np.int32)[:, None] + 8 * half[None]
    return replace(batch, tokens=own[None] + np.asarray(batch.tokens) % 8)


@pytest.mark.parametrize(
    ("unit", "layout"),
    [
        pytest.param(
            "sequence",
            "mesh.data=4 mesh.context=2 train.microbatches=4",
            marks=pytest.mark.slow,
        ),
        ("microbatch", "mesh.fsdp=2 mesh.expert=2 mesh.context=2 train.microbatches=2"),
    ],
)
def test_the_balance_loss_knows_no_shards(unit, layout):
    """Case C22. Were it a mean over devices, skewed ones would make it larger."""
    options = (
        *SMALL,
        "model.moe.experts=8",
        "model.moe.aux_loss=1.0",
        f"model.moe.aux_loss_over={unit}",
    )
    config = make_config(*options, *layout.split())
    metrics, grads = layout_gradients(config, skewed_batch(config))
    expected, expected_grads = reference_loss_gradients(config, skewed_batch(config))
    assert_allclose(metrics["router_aux_loss"], expected["objective"] - expected["loss"], rtol=1e-5)
    assert_same_gradients(grads, expected_grads)


@pytest.mark.parametrize("experts", [1, 2, 4, 8])
def test_each_expert_counts_once_in_the_norm(experts):
    """Case C33."""
    config = make_config(*MOE, f"mesh.expert={experts}", f"mesh.fsdp={8 // experts}")
    layout, params = lay_out(config), abstract_state(config).params
    cuts = specs(params, layout.state_spec)
    ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), params)
    run = jax.shard_map(
        partial(clip, limit=1.0, layout=layout),
        mesh=layout.mesh, in_specs=(cuts,), out_specs=(cuts, P()), check_vma=False,
    )  # fmt: skip
    clipped, norm = jax.jit(run)(ones)
    expected = math.sqrt(sum(leaf.size for leaf in jax.tree.leaves(ones)))
    assert_allclose(norm, expected, rtol=1e-6)
    assert_allclose(clipped.layers.moe.up[...], 1 / expected, rtol=1e-6)


BIASED = (*MOE, *SGD, "optimizer.lr=0.01", "model.moe.bias_update_rate=0.01")


@functools.cache
def bias_after_three_updates():
    bias = np.asarray(train(3, *BIASED)[1].buffers["moe"])
    assert bias.shape == (2, 8) and len(np.unique(bias)) > 2
    return bias


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "remat.policy=full mesh.expert=2 mesh.tensor=2",
        "mesh.fsdp=2 mesh.context=4 layout.experts=[context]",
    ],
)
def test_the_bias_of_routers_is_the_same_on_any_mesh(layout):
    """Bits: it follows from integers. Recomputation counts nothing twice."""
    _, state = train(3, *BIASED, *layout.split())
    np.testing.assert_array_equal(state.buffers["moe"], bias_after_three_updates())


def test_padding_and_evaluations_move_no_bias():
    config = make_config(*BIASED, "train.seq_len=32", "mesh.expert=4", "mesh.tensor=2")
    batches = [
        padded(synthetic_batch(make_config(*BIASED, f"run.seed={seed}"))) for seed in range(3)
    ]
    layout = lay_out(config)
    evaluate = make_eval_step(config, layout)

    def look(state):
        evaluate(state.params, place(batches[0], config, layout), state.buffers)

    _, state = run_steps(config, batches, between=look)
    np.testing.assert_array_equal(state.buffers["moe"], bias_after_three_updates())


@pytest.mark.slow
def test_verify_meets_experts_in_every_pair():
    layouts = verify.pairwise_cover(make_config(*MOE))
    for choice in ("mesh.expert=2", "mesh.expert=4"):
        for experts in ("layout.experts=[expert,context]", "layout.experts=[context,tensor]"):
            assert any({choice, experts} <= set(layout.split()) for layout in layouts)
    assert not any("layout.overlap" in layout for layout in layouts)
    batch_wide = make_config(*MOE, "model.moe.aux_loss_over=microbatch")
    assert not any("microbatches" in layout for layout in verify.pairwise_cover(batch_wide))
