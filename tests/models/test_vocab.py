"""The two ends of the vocabulary against whole logits. Shapes: B rows, S tokens, D width."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from meshwright.models import vocab
from meshwright.models.vocab import Loss, cross_entropy_share
from meshwright.sharding.collectives import all_reduce
from meshwright.sharding.gradients import reduce_gradients
from meshwright.sharding.layout import specs
from meshwright.sharding.rules import ZERO_AXES
from runs import layout_on, shard_map

B, S, D, SIZE, STORED = 2, 8, 8, 257, 384

EVERYTHING = Loss(SIZE, z_loss=1e-2, label_smoothing=0.1, softcap=2.0)
LOSSES = {
    "plain": Loss(SIZE),
    "smoothing": Loss(SIZE, label_smoothing=0.1),
    "z-loss": Loss(SIZE, z_loss=1e-2),
    "softcap": Loss(SIZE, softcap=2.0),
}
MESHES = {
    "tensor=8": {"tensor": 8},
    "no sequence": {"fsdp": 2, "tensor": 4, "sequence_parallel": False},
    "zero 1": {"data": 2, "fsdp": 1, "tensor": 2, "zero": 1},
}


@pytest.fixture(scope="module")
def inputs():
    """x, table with zero padding rows, targets, weights that are uneven and partly zero."""
    rng = np.random.default_rng(0)
    table = np.zeros((STORED, D), np.float32)
    table[:SIZE] = rng.normal(size=(SIZE, D))
    x = rng.normal(size=(B, S, D)).astype(np.float32)
    targets = rng.integers(0, SIZE, (B, S), dtype=np.int32)
    targets[0, :2] = 0, SIZE - 1
    weights = (rng.random((B, S)) * (rng.random((B, S)) < 0.7)).astype(np.float32)
    weights[0, :2] = 1
    return x, nnx.Param(table, axes=("vocab", "embed"), role="embedding"), targets, weights


def plain(x, table, targets, weights, loss):
    """Objective and the sums to log, from whole logits of the real vocabulary."""
    logits = x @ table[...][:SIZE].T
    if loss.softcap:
        logits = loss.softcap * jnp.tanh(logits / loss.softcap)
    log_p = jax.nn.log_softmax(logits)
    nll = -jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    smooth = -log_p.mean(-1)
    z = loss.z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    sums = {"loss": jnp.sum(nll * weights)}
    if loss.label_smoothing:
        sums["smoothing_loss"] = jnp.sum(loss.label_smoothing * (smooth - nll) * weights)
    if loss.z_loss:
        sums["z_loss"] = jnp.sum(z * weights)
    return sum(sums.values()), sums


def sharded(inputs, layout, loss):
    """Objective, sums and gradients by (x, table) on a mesh."""
    x, table, targets, weights = inputs
    x_spec = P(ZERO_AXES, "tensor" if layout.config.sequence_parallel else None)
    in_specs = x_spec, specs(table, layout.param_spec)
    out_specs = x_spec, specs(table, layout.state_spec)

    def local(arguments, targets, weights):
        def share(arguments):
            return cross_entropy_share(*arguments, targets, weights, layout, loss)

        (value, sums), grads = jax.value_and_grad(share, has_aux=True)(arguments)
        value, sums = all_reduce((value, sums), layout.mesh.axis_names, layout)
        return value, sums, reduce_gradients(grads, in_specs, out_specs, layout)

    rows = P(ZERO_AXES)
    run = shard_map(local, layout, (in_specs, rows, rows), (P(), P(), out_specs))
    return run((x, table), targets, weights)


def check(inputs, layout, loss):
    x, table, targets, weights = inputs
    differentiate = jax.value_and_grad(plain, argnums=(0, 1), has_aux=True)
    (value, sums), grads = differentiate(x, table, targets, weights, loss)
    found_value, found_sums, found_grads = sharded(inputs, layout, loss)
    np.testing.assert_allclose(found_value, value, rtol=1e-5)
    assert found_sums.keys() == sums.keys()
    for name, expected in sums.items():
        np.testing.assert_allclose(found_sums[name], expected, rtol=1e-5, err_msg=name)
    for found, expected in zip(jax.tree.leaves(found_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6 * np.abs(expected).max())
    assert not np.any(found_grads[1][...][SIZE:])


@pytest.mark.parametrize("name", LOSSES)
def test_each_term_of_the_loss_on_one_device(inputs, name):
    check(inputs, layout_on(), LOSSES[name])


@pytest.mark.parametrize("name", MESHES)
def test_all_terms_at_once_on_meshes(inputs, name):
    """On tensor=8 the last devices hold padding alone."""
    check(inputs, layout_on(**MESHES[name]), EVERYTHING)


def chunks_of(tokens, monkeypatch):
    monkeypatch.setattr(vocab, "SMALLEST_CHUNK", 1)
    monkeypatch.setattr(vocab, "LOGITS_AT_ONCE", tokens * STORED)


@pytest.mark.parametrize("chunk", [1, 5])
def test_chunks_do_not_matter(inputs, chunk, monkeypatch):
    chunks_of(chunk, monkeypatch)
    check(inputs, layout_on(), EVERYTHING)


def test_huge_logits_stay_finite(inputs):
    x, table, targets, weights = inputs
    value, _, grads = sharded(
        (1e4 * x, table, targets, weights), layout_on(tensor=8), LOSSES["plain"]
    )
    assert np.isfinite(value) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_targets_of_weight_zero_do_not_matter(inputs):
    x, table, targets, weights = inputs
    layout = layout_on(tensor=2)
    found = jax.tree.leaves(sharded(inputs, layout, EVERYTHING))
    other = np.where(weights == 0, (targets + 100) % SIZE, targets)
    for a, b in zip(
        jax.tree.leaves(sharded((x, table, other, weights), layout, EVERYTHING)), found, strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_full_logits_never_exist(inputs, monkeypatch):
    chunks_of(4, monkeypatch)
    x, table, targets, weights = inputs
    share = partial(cross_entropy_share, layout=layout_on(), loss=EVERYTHING)
    text = jax.jit(jax.value_and_grad(share, argnums=(0, 1), has_aux=True)).lower(*inputs).as_text()
    assert f"tensor<4x{STORED}xf32>" in text
    assert f"tensor<{B * S}x{STORED}x" not in text and f"{B}x{S}x{STORED}x" not in text
