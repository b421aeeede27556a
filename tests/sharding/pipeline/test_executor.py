"""Any checked table runs as it says, and its gradients are those of the model in one piece.

A model of matrices alone: embedding, tanh(x·w) layer by layer, squared distances from targets.
"""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.sharding import linear as linear_module
from meshwright.sharding.layout import specs
from meshwright.sharding.linear import linear
from meshwright.sharding.pipeline.executor import Stages, run_schedule
from meshwright.sharding.pipeline.load import read_schedule
from meshwright.sharding.pipeline.schedules import (
    NAMES,
    UNIFORM,
    Schedule,
    build_schedule,
    held_depths,
)
from meshwright.sharding.taps import find_products, make_taps, weight_gradients, with_taps
from runs import layout_on, shard_map

B, S, D, V, LAYERS = 2, 4, 8, 5, 9
"""Rows of a micro-batch, tokens, width, rows of the embedding, layers of the model."""


def make_model(microbatches: int):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32) / 2

    layers = {"w": normal(LAYERS, D, D), "scale": 1 + normal(LAYERS, D)}
    pieces = {
        "ids": rng.integers(0, V, (microbatches, B, S)),
        "target": normal(microbatches, B, S, D),
    }
    return {"table": normal(V, D)}, layers, pieces


def layer(p, x, layout):
    y = linear(x, p["w"], layout, enter="tensor")
    return x + jnp.tanh(y) * p["scale"][...][None, None]


def as_params(layers):
    return {
        "w": nnx.Param(layers["w"], axes=("embed", "mlp")),
        "scale": nnx.Param(layers["scale"], axes=("channel",)),
    }


def pipeline_gradients(schedule: Schedule, tell=None):
    """(loss, gradients of the table, of layers in the model's order)"""
    ends, layers, pieces = make_model(schedule.microbatches)
    layout = layout_on(pipe=schedule.stages)
    sizes = schedule.stages, schedule.chunks, schedule.placement
    depths = schedule.stages * schedule.chunks
    places = -(-LAYERS // depths)
    held = np.asarray(
        [
            number if number < LAYERS * (depth + 1) // depths else LAYERS
            for depth in held_depths(*sizes)
            for number in range(LAYERS * depth // depths, LAYERS * depth // depths + places)
        ]
    )
    stack = jax.tree.map(
        lambda a: np.concatenate([a, np.zeros_like(a[:1])])[np.minimum(held, LAYERS)],
        as_params(layers),
    )

    def embed(ends, piece):
        return ends["table"][piece["ids"]]

    def layers_of(chunk, x, piece, depth):
        first, end = LAYERS * depth // depths, LAYERS * (depth + 1) // depths
        number = first + jnp.arange(-(-LAYERS // depths))

        def one(x, numbered):
            number, p = numbered
            return jnp.where(number < end, layer(p, x, layout), x), None

        x, _ = lax.scan(one, tell(x) if tell else x, (number, chunk))
        return (x, jnp.zeros(())), {"ran": jnp.ones(())}

    def head(ends, y, piece):
        share = jnp.sum((y - piece["target"]) ** 2)
        return share / schedule.stages, {"loss": share}

    def local(ends, stack, pieces):
        stages = Stages(embed, layers_of, head)
        totals = run_schedule(schedule, stages, ends, stack, pieces, layout)
        grads = lax.psum(totals.ends, "pipe")  # each stage has its share of embedding and head
        return (
            totals.head_sums["loss"],
            lax.psum(totals.layer_sums["ran"], "pipe"),
            grads,
            totals.stack,
        )

    spec = specs(stack, layout.param_spec)
    loss, ran, of_ends, of_stack = jax.device_get(
        shard_map(local, layout, (P(), spec, P()), (P(), P(), P(), spec))(ends, stack, pieces)
    )
    assert ran == schedule.microbatches * depths
    order = [list(held).index(number) for number in range(LAYERS)]
    return loss, of_ends, {name: leaf[...][order] for name, leaf in of_stack.items()}


def plain_gradients(microbatches: int):
    ends, layers, pieces = make_model(microbatches)

    def loss(ends, layers):
        x = ends["table"][pieces["ids"]]
        for number in range(LAYERS):
            y = jnp.tanh(x @ layers["w"][number])
            x = x + y * layers["scale"][number][None, None, None]
        return jnp.sum((x - pieces["target"]) ** 2)

    value, grads = jax.value_and_grad(loss, argnums=(0, 1))(ends, layers)
    return value, *grads


def assert_same(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()),
        found,
        expected,
    )


@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNIFORM])
def test_a_zero_bubble_table_runs_each_op_once_where_it_says(monkeypatch, name):
    """Which ops run is told by the devices themselves."""
    p = 4
    schedule = build_schedule(name, p, microbatches=2 * p)
    ran, lock = Counter(), threading.Lock()

    def count(kind):
        def told(stage):
            with lock:
                ran[int(stage), kind] += 1

        jax.debug.callback(told, lax.axis_index("pipe"))

    @jax.custom_vjp
    def tell(x):
        return x

    def forward(x):
        count("F")
        return x, None

    def backward(_, dx):
        count("B")
        return (dx,)

    tell.defvjp(forward, backward)

    def weight_gradient(x, dy):
        count("W")
        return dot_weight(x, dy)

    dot_weight = linear_module._dot_weight
    monkeypatch.setattr(linear_module, "_dot_weight", weight_gradient)
    found = pipeline_gradients(schedule, tell)
    jax.effects_barrier()
    assert_same(found, plain_gradients(2 * p))

    expected = Counter((stage, op.kind) for stage, _, op in schedule.ops())
    layers = -(-LAYERS // (p * schedule.chunks))  # each with a W of its own
    for stage in range(p):
        expected[stage, "W"] *= layers
    assert ran == expected


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "chunks"), [("zb_h1", 3, 2, 1), ("interleaved", 2, 4, 2)]
)
def test_stages_may_branch_in_any_order(name, stages, microbatches, chunks):
    """Fewer micro-batches than stages; no W apart from its B."""
    schedule = build_schedule(name, stages, microbatches, chunks)
    assert not schedule.uniform
    assert_same(pipeline_gradients(schedule), plain_gradients(microbatches))


def test_a_table_of_one_s_own_runs():
    """W beside its B, W later, W beside another's B, F beside a B."""
    table = (
        "placement,v\n"
        "F0,F1,,F0.1,,F1.1+BW0.1,B1.1,,B0,W1.1,B1+W0,W1\n"
        ",F0,F0.1,F1,F1.1,,B0.1,BW0,B1.1+W0.1,BW1,W1.1\n"
    )
    schedule = read_schedule(table, "own")
    assert_same(pipeline_gradients(schedule), plain_gradients(2))


def test_taps_and_weight_gradients_are_the_backward_pass_of_a_product():
    """Through a scan and through recomputation, in groups of layers too; a scale is no product."""
    layout = layout_on(data=1)
    _, layers, pieces = make_model(1)
    x, target = pieces["target"][0], pieces["target"][0] ** 2
    groups = as_params(jax.tree.map(lambda a: a.reshape(3, 3, *a.shape[1:]), layers))

    def share(groups):
        @partial(jax.checkpoint, prevent_cse=False)
        def one(x, p):
            return layer(p, x, layout), None

        y, _ = lax.scan(lambda x, group: lax.scan(one, x, group), x, groups)
        return jnp.sum(y * target)

    def local(groups):
        leaves, structure = jax.tree.flatten(groups)
        products = find_products(share, groups)
        (product,) = products
        assert product.weights == (1,)

        def apart(taps):
            return share(jax.tree.unflatten(structure, with_taps(products, leaves, taps)))

        taps = jax.grad(apart)(make_taps(products, leaves))
        return weight_gradients(products, leaves, taps)[1], jax.grad(share)(groups)["w"][...]

    later, at_once = shard_map(local, layout, (P(),), (P(), P()))(groups)
    assert later.shape == groups["w"].shape
    assert_same(later, at_once)
