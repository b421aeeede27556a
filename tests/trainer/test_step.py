"""One compiled step: what it consumes, returns and reports, and accumulation."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.models.batch import Batch
from meshwright.models.position import position_number
from meshwright.trainer.config.load import override
from meshwright.trainer.state import abstract_state, init_state, lay_out, state_shardings
from meshwright.trainer.step import make_train_step

LR, CLIP = 0.1, 1.0
COUNTERS = {"step": jnp.int32, "skipped": jnp.int32, "position": jnp.uint32}
METRICS = {*COUNTERS, "loss", "tokens", "grad_norm", "lr"}


def random_batch(config, layout) -> Batch:
    """[G, B/G, S]: one document a row, targets masked unevenly, one row without any."""
    train = config.train
    rng = np.random.default_rng(0)
    shape = (train.batch_size, train.seq_len)
    weights = rng.random(shape) < np.linspace(0.0, 1.0, train.batch_size)[:, None]
    arrays = (
        rng.integers(0, config.model.vocab_size, shape),
        rng.integers(0, config.model.vocab_size, shape),
        weights.astype(np.float32),
        np.broadcast_to(np.arange(train.seq_len), shape),
        np.zeros(shape, np.int32),
    )
    pieces = (train.microbatches, train.batch_size // train.microbatches, train.seq_len)
    sharding = layout.sharding(layout.batch_spec())
    place = [a.astype(np.float32 if a.dtype == np.float32 else np.int32) for a in arrays]
    return Batch(*(jax.device_put(a.reshape(pieces), sharding) for a in place))


def train(config, steps):
    """Several steps on one batch: the parameters after each on the host, and its metrics."""
    layout = lay_out(config)
    step, batch = make_train_step(config, layout), random_batch(config, layout)
    first = state = init_state(config, layout)
    params, metrics = [], []
    for _ in range(steps):
        state, values = step(state, batch)
        params.append(jax.device_get(state.params))
        metrics.append(values)
    return SimpleNamespace(
        layout=layout, batch=batch, first=first, state=state, params=params, metrics=metrics
    )


@pytest.fixture(scope="module")
def config(small_config):
    return override(
        small_config,
        *("optimizer.name=sgd", f"optimizer.lr={LR}", "optimizer.schedule=constant"),
        *("optimizer.weight_decay=0", f"optimizer.clip={CLIP}"),
    )


@pytest.fixture(scope="module")
def trained(config):
    return train(config, steps=6)


def test_the_state_is_donated(trained):
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(trained.first))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((trained.state, trained.batch)))


def test_the_new_state_lies_where_the_old_one_lay(config, trained):
    expected = state_shardings(abstract_state(config), trained.layout)
    leaves = zip(jax.tree.leaves(trained.state), jax.tree.leaves(expected), strict=True)
    assert all(leaf.sharding.is_equivalent_to(sharding, leaf.ndim) for leaf, sharding in leaves)


def test_metrics_are_replicated_scalars(trained):
    for metrics in trained.metrics:
        assert set(metrics) == METRICS
        for name, value in metrics.items():
            assert value.shape == ((2,) if name == "position" else ())
            assert value.dtype == COUNTERS.get(name, jnp.float32)
            assert value.sharding.is_fully_replicated


def test_counters_are_those_after_the_update(trained):
    counters = [(m["step"].item(), position_number(m["position"])) for m in trained.metrics]
    assert counters == [(i, 16 * i) for i in range(1, 7)]
    assert (trained.state.step.item(), position_number(trained.state.position)) == counters[-1]


def test_tokens_are_the_valid_targets(trained):
    targets = int(np.asarray(trained.batch.weights).sum())
    assert 0 < targets < trained.batch.weights.size
    assert {m["tokens"].item() for m in trained.metrics} == {targets}


def test_the_loss_falls_on_a_fixed_batch(trained):
    losses = [m["loss"].item() for m in trained.metrics]
    assert all(later < earlier for earlier, later in zip(losses, losses[1:], strict=False))


def test_the_norm_is_that_before_the_clip_and_the_update_that_after(trained):
    """Plain SGD without decay moves by lr·gradient, so its length tells the clipped norm."""
    updates = zip(trained.params, trained.params[1:], trained.metrics[1:], strict=False)
    for before, after, metrics in updates:
        norm, lr = metrics["grad_norm"].item(), metrics["lr"].item()
        moved = jax.tree.map(lambda a, b: np.sum((a - b) ** 2, dtype=np.float64), before, after)
        length = np.sqrt(sum(jax.tree.leaves(moved)))
        assert length == pytest.approx(lr * min(norm, CLIP), rel=1e-4)
    assert any(metrics["grad_norm"].item() > CLIP for metrics in trained.metrics[1:])


def test_four_micro_batches_are_one_batch(config, trained):
    four = train(override(config, "train.microbatches=4"), steps=2)
    for ours, theirs in zip(four.metrics, trained.metrics, strict=False):
        for name, value in theirs.items():
            found, expected = np.asarray(ours[name]).tolist(), np.asarray(value).tolist()
            assert found == pytest.approx(expected, rel=1e-5), name
    for a, b in zip(*map(jax.tree.leaves, (four.params[1], trained.params[1])), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_auxiliary_losses_are_metrics_under_their_own_names(config):
    config = override(config, "train.z_loss=1e-4", "train.label_smoothing=0.1")
    layout = lay_out(config)
    state, batch = abstract_state(config), random_batch(config, layout)
    _, metrics = jax.eval_shape(make_train_step(config, layout), state, batch)
    assert set(metrics) == METRICS | {"z_loss", "smoothing_loss"}
