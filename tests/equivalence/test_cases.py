"""Cases of faults that other trainers had, by their number there."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest

from meshwright.models.batch import Batch
from meshwright.models.layers.attention import Attention
from meshwright.trainer.inspect.verify import global_norm, synthetic_batch
from meshwright.trainer.log.summary import summarize
from meshwright.trainer.optim.optimizer import decayed
from meshwright.trainer.state import abstract_state, init_state, lay_out, named_leaves
from meshwright.trainer.step import make_train_step
from runs import (
    SGD,
    SMALL,
    T0,
    assert_same_gradients,
    assert_same_metrics,
    assert_same_params,
    collectives,
    first_devices,
    gradients,
    layout_gradients,
    make_config,
    random_params,
    reference_gradients,
    reference_loss_gradients,
    run_steps,
    train,
)

EIGHT_HEADS = (*T0, "model.heads=8")


def uneven_batch():
    """T0 rows with 2 to 60 targets, and one of padding alone."""
    rng = np.random.default_rng(3)
    rows, tokens = 16, 64
    ids = rng.integers(0, 257, (1, rows, tokens + 1), dtype=np.int32)
    column = np.broadcast_to(np.arange(tokens, dtype=np.int32), (1, rows, tokens))
    counts = np.linspace(2, 60, rows).astype(int)
    counts[5] = 0
    real = column < counts[None, :, None]
    segments = np.where(real, 0, -1).astype(np.int32)
    return Batch(ids[..., :-1], ids[..., 1:], real.astype(np.float32), column, segments)


@functools.cache
def uneven_reference():
    return reference_loss_gradients(make_config(*T0), uneven_batch())


@pytest.mark.parametrize(
    ("accumulation", "mesh"),
    [
        (4, "mesh.data=2 mesh.fsdp=2 mesh.tensor=2"),
        *(
            pytest.param(accumulation, mesh, marks=pytest.mark.slow)
            for accumulation, mesh in (
                (16, ""),
                (1, "mesh.fsdp=8"),
                (2, "mesh.data=4 mesh.fsdp=2 layout.zero=1"),
                (8, "mesh.data=2 mesh.tensor=4 layout.sequence_parallel=false"),
            )
        ),
    ],
)
def test_a_mean_over_targets_is_not_a_mean_of_means(accumulation, mesh):
    """Case C08."""
    config = make_config(*T0, f"train.microbatches={accumulation}", *mesh.split())
    metrics, grads = layout_gradients(config, uneven_batch())
    expected, expected_grads = uneven_reference()
    assert metrics["tokens"] == uneven_batch().weights.sum()
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(global_norm(grads), global_norm(expected_grads), rtol=1e-4)
    assert_same_gradients(grads, expected_grads)


def test_a_batch_without_any_target_trains_nothing():
    """Case C08."""
    batch = uneven_batch()
    config = make_config(*T0, "train.microbatches=16")
    metrics, grads = layout_gradients(config, replace(batch, weights=0 * batch.weights))
    assert metrics == {"loss": 0.0, "tokens": 0.0}
    assert not any(leaf.any() for leaf in grads.values())


def test_clipping_is_once_per_update():
    """Case C09. The gradient of one micro-batch of eight is a hundred times the others'."""
    batch = synthetic_batch(make_config(*T0))
    weights = np.array(batch.weights)
    weights[:, 2:4] *= 100
    overrides = (*T0, *SGD, "optimizer.clip=1.0", "optimizer.weight_decay=0.0")
    runs = [
        run_steps(
            make_config(*overrides, f"train.microbatches={n}"), [replace(batch, weights=weights)]
        )
        for n in (1, 8)
    ]
    (one,), (eight,) = (history for history, _ in runs)
    assert one["grad_norm"] > 2  # so clipping does something
    assert_same_metrics(eight, one)
    (_, after), (_, after_eight) = runs
    assert_same_params(after_eight, after)
    before = random_params(make_config(*overrides))
    change = jax.tree.map(lambda a, b: np.asarray(a) - b, after.params, before)
    np.testing.assert_allclose(global_norm(named_leaves(change)), 0.3, rtol=1e-4)  # lr · limit


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_no_gradient_of_the_step_is_reduced_in_bf16(zero):
    """Case C12. Without tensor only weights are gathered, for products or, whole again after the
    update, in f32; and only gradients and sums are reduced.
    """
    config = make_config(
        *T0, "precision.compute=bf16", "mesh.data=2", "mesh.fsdp=4", f"layout.zero={zero}"
    )
    found = collectives(lowered(config).as_text())
    reduced = {dtype for name, dtype in found if name in ("all_reduce", "reduce_scatter")}
    gathered = {dtype for name, dtype in found if name == "all_gather"}
    assert reduced == {"f32"}
    assert gathered == {0: set(), 2: {"f32"}, 3: {"bf16"}}[zero]


def test_decay_follows_the_role_not_the_number_of_dims():
    """Case C13."""
    config = make_config(*T0, "model.bias=all", "model.qk_norm=head")
    state = abstract_state(config)

    def decaying(tree):
        return {
            name for name, flag in named_leaves(decayed(tree, config.optimizer)).items() if flag
        }

    blocks = {f"attention.{name}" for name in "qkvo"} | {
        f"swiglu.{name}" for name in ("gate", "up", "down")
    }
    expected = {"embed", "unembed", *(f"layers.{name}" for name in blocks)}
    assert decaying(state.params) == expected

    one = jax.eval_shape(lambda: Attention(config.model, jax.random.key(0)))
    for stack in ((), (4,), (2, 3, 4)):  # one layer; layers; chunks of stages of layers
        stacked = jax.tree.map(lambda a, s=stack: jax.ShapeDtypeStruct(s + a.shape, a.dtype), one)
        assert decaying(stacked) == set("qkvo")

    lines = summarize(config, lay_out(config, first_devices(config)), state)
    (printed,) = (line for line in lines if line.startswith("decayed"))
    assert set(printed.removeprefix("decayed").strip().split(", ")) == expected


@pytest.mark.parametrize(
    ("kv_heads", "tensor"),
    [
        (2, 4),
        *(
            pytest.param(kv, tensor, marks=pytest.mark.slow)
            for kv, tensor in ((1, 8), (1, 4), (1, 2), (2, 8), (2, 2), (4, 8), (4, 4), (4, 2))
        ),
    ],
)
def test_kv_heads_and_tensor_shards_in_any_proportion(kv_heads, tensor):
    """Case C17."""
    model = (*EIGHT_HEADS, f"model.kv_heads={kv_heads}")
    metrics, grads = gradients(*model, f"mesh.tensor={tensor}")
    expected, expected_grads = reference_gradients(*model)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    assert_same_gradients(grads, expected_grads)


@pytest.mark.slow
def test_replicas_of_kv_weights_stay_the_same_bits():
    """Case C17."""
    model = (*EIGHT_HEADS, "model.kv_heads=2", "model.layers=2", "train.seq_len=16", *SGD)
    history, state = train(20, *model, "mesh.data=2", "mesh.tensor=4")
    expected_history, expected_state = train(20, *model)
    for name, leaf in named_leaves(state.params.layers.attention).items():
        copies = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        replicated = name in ("k", "v", "norm")
        assert {len(group) for group in copies.values()} == {8 if replicated else 2}
        for first, *others in copies.values():
            for other in others:
                np.testing.assert_array_equal(other, first, err_msg=name)
    for metrics, expected in zip(history, expected_history, strict=True):
        assert_same_metrics(metrics, expected)
    assert history[-1]["loss"] < history[0]["loss"]
    assert_same_params(state, expected_state)


@pytest.mark.parametrize("tied", [(), ("model.tie_embeddings=true",)], ids=["untied", "tied"])
def test_a_vocabulary_of_257_on_eight_tensor_shards(tied):
    """Case C18. Some shards hold padding alone; the reference has no padding."""
    model = (*EIGHT_HEADS, "model.kv_heads=1", *tied)
    metrics, grads = gradients(*model, "mesh.tensor=8")
    expected, expected_grads = reference_gradients(*model)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    assert_same_gradients(grads, expected_grads)
    for name in {"embed", "unembed"} & grads.keys():
        assert grads[name].shape[0] == 384 and not grads[name][257:].any()


def test_optimizer_state_is_cut_over_all_devices():
    """Case C20."""
    config = make_config(*T0, "mesh.fsdp=8", "optimizer.name=adamw")
    layout = lay_out(config)
    first = init_state(config, layout)
    _, second = train(1, *T0, "mesh.fsdp=8", "optimizer.name=adamw")
    for state in (first, second):
        leaves = [leaf for leaf in jax.tree.leaves((state.params, state.opt)) if leaf.ndim]
        total = sum(leaf.nbytes for leaf in leaves)
        assert total == 3 * sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
        held = dict.fromkeys(jax.devices(), 0)
        for leaf in leaves:
            for shard in leaf.addressable_shards:
                held[shard.device] += shard.data.nbytes
        for count in held.values():
            assert abs(count / (total / 8) - 1) < 0.1


def test_the_program_does_not_grow_with_depth():
    """Case C21."""
    sizes = [len(lowered(make_config(*T0, f"model.layers={n}")).as_text()) for n in (4, 16, 64)]
    assert max(sizes) < 1.01 * min(sizes)


def test_recomputation_lowers_temporary_bytes():
    """Case C21."""
    temp = {}
    for policy in ("none", "full"):
        compiled = lowered(make_config(*T0, f"remat.policy={policy}")).compile()
        temp[policy] = compiled.memory_analysis().temp_size_in_bytes
    assert temp["full"] < 0.5 * temp["none"]


STEPS = (*SMALL, *SGD, "optimizer.clip=0.5", "train.label_smoothing=0.1")


@pytest.mark.parametrize(
    ("data", "fsdp", "zero"),
    [
        (4, 2, 1),
        (1, 8, 3),
        *(
            pytest.param(*sizes, marks=pytest.mark.slow)
            for sizes in ((8, 1, 0), *((2, 4, zero) for zero in range(4)))
        ),
    ],
)
def test_hybrid_sharding_logs_the_norm_of_one_device(data, fsdp, zero):
    """Case C30; and C32: every other metric. Parameters after some updates are the same at all
    ZeRO stages."""
    layout = f"mesh.data={data}", f"mesh.fsdp={fsdp}", f"layout.zero={zero}"
    history, state = train(4, *STEPS, *layout)
    expected_history, expected_state = train(4, *STEPS)
    for metrics, expected in zip(history, expected_history, strict=True):
        assert_same_metrics(metrics, expected)
        assert metrics["grad_norm"] > 0.5  # so clipping does something
    names = {"step", "skipped", "position", "loss", "smoothing_loss", "tokens", "grad_norm", "lr"}
    assert history[0].keys() == names
    assert [(line["step"], line["position"]) for line in history] == [
        (1, 16),
        (2, 32),
        (3, 48),
        (4, 64),
    ]
    assert_same_params(state, expected_state)


@pytest.mark.parametrize(
    ("data", "context", "mode"),
    [
        (4, 2, "ulysses"),
        (1, 8, "ring"),
        *(
            pytest.param(*factors, marks=pytest.mark.slow)
            for factors in (
                (8, 1, "ring"),
                (4, 2, "ring"),
                *((2, 4, mode) for mode in ("zigzag", "usp")),
                *((1, 8, mode) for mode in ("zigzag", "all_gather")),
            )
        ),
    ],
)
def test_context_scales_no_gradient(data, context, mode):
    """Case C29. All factorings of eight devices, by parameters after updates of SGD."""
    layout = f"mesh.data={data}", f"mesh.context={context}", f"layout.context={mode}"
    history, state = train(4, *STEPS, *layout)
    expected_history, expected_state = train(4, *STEPS)
    for metrics, expected in zip(history, expected_history, strict=True):
        assert_same_metrics(metrics, expected)
    assert_same_params(state, expected_state)


def lowered(config):
    """The train step's lowering, from shapes alone."""
    train = config.train
    shape = (train.microbatches, train.batch_size // train.microbatches, train.seq_len)
    ids, weights = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (np.int32, np.float32))
    layout = lay_out(config, first_devices(config))
    return make_train_step(config, layout).lower(
        abstract_state(config), Batch(ids, ids, weights, ids, ids)
    )
