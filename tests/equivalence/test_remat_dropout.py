"""Recomputation changes no bit, with dropout or without; dropout changes with no layout (C19)."""

import functools

import chex
import jax
import pytest

from meshwright.models.position import position_number
from meshwright.trainer.config.load import override
from meshwright.trainer.inspect.verify import synthetic_batch
from meshwright.trainer.state import abstract_state, lay_out, state_shardings
from meshwright.trainer.step import make_eval_step, make_train_step, step_shapes
from runs import (
    AS_SHIPPED,
    SGD,
    SMALL,
    assert_same_gradients,
    assert_same_metrics,
    first_devices,
    gradients,
    layout_gradients,
    make_config,
    place,
    run_steps,
)

POLICIES = (
    "remat.policy=full",
    "remat.policy=selective",
    "remat.policy=offload",
    "remat.policy=selective remat.names=[attention.context,attention.logsumexp]",
    "remat.policy=offload remat.names=[block.input] remat.every=2",
)
MODEL = (*SMALL, "model.layers=4", "model.qk_norm=head", "model.bias=all")
DROPPED = (*MODEL, "train.dropout=0.1")
MESH = ("mesh.fsdp=2", "mesh.tensor=2")


@functools.cache
def shipped(*overrides: str):
    return layout_gradients(make_config(*overrides), options=AS_SHIPPED)


def assert_same_bits(found, expected):
    (metrics, grads), (expected_metrics, expected_grads) = found, expected
    assert metrics == expected_metrics
    chex.assert_trees_all_equal(grads, expected_grads)


@pytest.mark.parametrize(
    "policy",
    [
        POLICIES[0],
        *(pytest.param(policy, marks=pytest.mark.slow) for policy in POLICIES[1:4]),
        POLICIES[4],
    ],
)
def test_recomputation_changes_no_bit_on_a_mesh_with_dropout(policy):
    found = shipped(*DROPPED, *MESH, *policy.split())
    assert_same_bits(found, shipped(*DROPPED, *MESH))


@pytest.mark.parametrize("policy", [POLICIES[1], pytest.param(POLICIES[2], marks=pytest.mark.slow)])
def test_recomputation_changes_no_bit_on_one_device(policy):
    assert_same_bits(shipped(*MODEL, *policy.split()), shipped(*MODEL))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(" ".join(MESH), marks=pytest.mark.slow),
        "mesh.data=2 mesh.fsdp=2 mesh.tensor=2 train.microbatches=2 remat.policy=selective",
        pytest.param(
            "mesh.data=2 mesh.tensor=4 layout.sequence_parallel=false layout.zero=1",
            marks=pytest.mark.slow,
        ),
        "train.microbatches=4 remat.policy=full remat.every=2",
    ],
)
def test_dropout_is_that_of_one_device_in_every_layout(layout):
    """Case C19."""
    metrics, grads = gradients(*DROPPED, *layout.split())
    expected, expected_grads = gradients(*DROPPED)
    assert_same_metrics(metrics, expected)
    assert_same_gradients(grads, expected_grads)


def test_dropout_changes_the_loss():
    with_it, without = (gradients(*overrides)[0]["loss"] for overrides in (DROPPED, MODEL))
    assert abs(with_it - without) > 1e-3


def test_a_run_goes_on_with_its_masks_on_another_mesh():
    """And the same rows meet another mask at another position."""
    overrides = (*SMALL, *SGD, "train.dropout=0.5")
    one = make_config(*overrides)
    batch = synthetic_batch(one)
    states = []
    straight, _ = run_steps(
        one, [batch, batch, batch], between=lambda state: states.append(jax.device_get(state))
    )
    other = make_config(*overrides, *MESH, "train.microbatches=2")
    layout = lay_out(other, first_devices(other))
    shardings = state_shardings(abstract_state(other), layout)
    state = jax.device_put(states[0], shardings)
    step = make_train_step(other, layout)
    for expected in straight[1:]:
        state, metrics = step(state, place(batch, other, layout))
        position = {"position": position_number(metrics.pop("position"))}
        metrics = {name: float(value) for name, value in metrics.items()} | position
        assert_same_metrics({name: metrics[name] for name in expected}, expected)


def lowered(make, *overrides, dropout):
    config = override(make_config(*SMALL), *overrides, f"train.dropout={dropout}")
    layout = lay_out(config, jax.devices()[:1])
    state, batch = abstract_state(config), step_shapes(config, layout)[1]
    shapes = (state if make is make_train_step else state.params), batch
    return make(config, layout).lower(*shapes).as_text()


def test_evaluation_drops_nothing():
    assert lowered(make_eval_step, dropout=0.5) == lowered(make_eval_step, dropout=0.0)


def test_without_dropout_nothing_is_hashed():
    hashed = [lowered(make_train_step, dropout=rate).count("stablehlo.xor") for rate in (0.0, 0.1)]
    assert hashed[0] == 0 < hashed[1]
