"""Collective matmul beside the gather and reduce-scatter that it replaces: numbers and programs.

Shapes: B sequences, S tokens, D width, H query heads, E head width, F hidden width.
"""

import functools
import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from meshwright.sharding.collective_matmul import gather_matmul, matmul_scatter
from meshwright.sharding.collectives import all_gather, axis_index, reduce_scatter
from meshwright.sharding.config import LayoutConfig
from meshwright.sharding.gradients import reduce_gradients
from meshwright.sharding.layout import specs
from meshwright.sharding.linear import linear
from meshwright.sharding.rules import ZERO_AXES, Dim
from runs import collectives, layout_on, shard_map

B, D, H, E, F = 4, 12, 8, 2, 16
CHUNK = 3  # tokens of one device: odd
DIRECTIONS = pytest.mark.parametrize("directions", ["ring", "bidirectional"])


def overlapped(directions, dims=(), **keys):
    return layout_on(dims, overlap=directions, **keys)


@DIRECTIONS
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_rings_are_the_collectives_they_replace(size, directions):
    """On whole numbers, where the order of sums changes nothing, and on trees."""
    layout, rng = overlapped(directions, tensor=size), np.random.default_rng(0)
    cut = rng.integers(-9, 9, (2, size * CHUNK, 4)).astype(np.float32)
    whole = rng.integers(-9, 9, (2, size * CHUNK, 5)).astype(np.float32)

    def gathered(cut, whole):
        ys = {"square": cut["a"] ** 2, "both": cut["b"] + whole[..., :4]}
        return ys, [jnp.einsum("bta,btd->ad", cut["a"], whole)]

    def partial_sums(whole):
        return whole**2, whole[..., :2]

    def local(cut, whole):
        cut = {"a": cut, "b": 2 * cut}
        whole = whole + axis_index("tensor", layout)  # as partial sums, other ones everywhere
        at = "tensor", 1, layout
        found = gather_matmul(gathered, cut, whole, *at), matmul_scatter(partial_sums, whole, *at)
        expected = (
            gathered(jax.tree.map(lambda a: all_gather(a, *at), cut), whole),
            jax.tree.map(lambda a: reduce_scatter(a, *at), partial_sums(whole)),
        )
        return jax.tree.map(lambda a: a[None], (found, expected))

    run = shard_map(local, layout, (P(None, "tensor"), P()), P("tensor"))
    chex.assert_trees_all_equal(*run(cut, whole))


def dots_and_permutes(function, layout, *arrays):
    """The program's products and permutes in their order, each with those before it that it needs.

    function: of local arrays, cut over tensor along their first dim; weights come from inside.
    """
    program = jax.make_jaxpr(shard_map(function, layout, P("tensor"), P("tensor")))(*arrays)
    for _ in ("jit", "shard_map"):
        (call,) = program.eqns
        program = call.params["jaxpr"]
    found, needed = [], {}
    for eqn in getattr(program, "jaxpr", program).eqns:
        needs = set().union(*(needed.get(id(v), ()) for v in eqn.invars))
        if eqn.primitive.name in ("dot_general", "ppermute"):
            found.append((eqn.primitive.name, {found[i][0] for i in needs}, needs))
            needs = needs | {len(found) - 1}
        needed |= {id(v): needs for v in eqn.outvars}
    return found


@DIRECTIONS
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_permutes_and_products_do_not_wait_for_each_other(size, directions):
    """N - 1 permutes, in half as many hops if both ways; no gathered chunk waits for a product
    before it travels on, and no product for a sum that arrives."""
    layout = overlapped(directions, tensor=size)

    def gather(x):
        return gather_matmul(lambda x, _: (x @ x.T, None), x, None, "tensor", 0, layout)[0]

    def scatter(x):
        return matmul_scatter(lambda x: x @ jnp.ones((D, F)), x, "tensor", 0, layout)

    gathering = dots_and_permutes(gather, layout, jnp.ones((size * CHUNK, D)))
    scattering = dots_and_permutes(scatter, layout, jnp.ones((size * size * CHUNK, D)))
    for found in (gathering, scattering):
        names = [name for name, *_ in found]
        assert (names.count("dot_general"), names.count("ppermute")) == (size, size - 1)
        hops = []
        for name, _, needs in found:
            hops.append(max((hops[i] for i in needs), default=0) + (name == "ppermute"))
        assert max(hops) == (size - 1 if directions == "ring" else size // 2)
    assert all(kinds <= {"ppermute"} for name, kinds, _ in gathering if name == "ppermute")
    assert not any(kinds for name, kinds, _ in scattering if name == "dot_general")
    if directions == "ring":  # in the order of the program as well
        both = ["ppermute", "dot_general"] * (size - 1)
        assert [name for name, *_ in gathering] == [*both, "dot_general"]
        assert [name for name, *_ in scattering] == ["dot_general", *both]


def make_params(kv_heads):
    rng = np.random.default_rng(1)

    def make(axes, *shape):
        value = rng.normal(size=shape, scale=0.25).astype(np.float32)
        return nnx.Param(value, axes=axes, role="matrix")

    return {
        "q": make(("embed", "heads", "head_dim"), D, H, E),
        "k": make(("embed", "kv_heads", "head_dim"), D, kv_heads, E),
        "k_bias": make(("kv_heads", "head_dim"), kv_heads, E),
        "o": make(("heads", "head_dim", "embed"), H, E, D),
        "o_bias": make(("channel",), D),
        "up": make(("embed", "mlp"), D, F),
        "down": make(("mlp", "embed"), F, D),
    }


def layers(p, x, layout):
    """Several weights at one entrance and one alone, matrices by heads, biases."""
    q, k = linear(x, (p["q"], p["k"]), layout, biases=(None, p["k_bias"]), enter="tensor")
    mixed = q * jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    x = x + linear(mixed, p["o"], layout, biases=(p["o_bias"],), leave="tensor")
    hidden = jnp.tanh(linear(x, p["up"], layout, enter="tensor"))
    return linear(hidden, p["down"], layout, leave="tensor")


def differentiated(function, params, layout):
    """(params, x, cotangent) -> y and the gradients by (params, x) of <y, cotangent>."""
    x_spec = P(ZERO_AXES, "tensor")
    in_specs, out_specs = specs(params, layout.param_spec), specs(params, layout.state_spec)

    def local(params, x, cotangent):
        y, transpose = jax.vjp(partial(function, layout=layout), params, x)
        before, after = (in_specs, x_spec), (out_specs, x_spec)
        return y, reduce_gradients(transpose(cotangent), before, after, layout)

    return shard_map(local, layout, (in_specs, x_spec, x_spec), (x_spec, (out_specs, x_spec)))


MESHES = {2: {"tensor": 2, "fsdp": 4}, 4: {"tensor": 4, "fsdp": 2}, 8: {"tensor": 8}}


@functools.cache
def layer_gradients(tensor, dtype=jnp.float32, **overlap):
    """y and all gradients of `layers` with ZeRO-3, on random arrays. kv heads are cut over
    tensor=2 and repeated over 4 and 8."""
    layout = layout_on([Dim("kv_heads", 2, "model.kv_heads")], **MESHES[tensor], **overlap)
    params = make_params(kv_heads=2)
    x, cotangent = np.random.default_rng(2).normal(size=(2, B, tensor * CHUNK, D))
    run = differentiated(layers, params, layout)
    return run(params, jnp.asarray(x, dtype), jnp.asarray(cotangent, dtype))


@DIRECTIONS
@pytest.mark.parametrize("tensor", MESHES)
def test_linear_is_gather_then_product(tensor, directions):
    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())

    found = layer_gradients(tensor, overlap=directions)
    jax.tree.map(close, found, layer_gradients(tensor))


@DIRECTIONS
def test_bf16_is_as_near_f32_as_gather_then_product(directions):
    """Over 8 hops, each of which rounds the travelling sum."""
    exact, expected = layer_gradients(8), layer_gradients(8, jnp.bfloat16)
    found = layer_gradients(8, jnp.bfloat16, overlap=directions)

    def near(a, b, exact):
        assert a.dtype == b.dtype
        error, usual = (np.linalg.norm(np.float64(c) - np.float64(exact)) for c in (a, b))
        assert error < 1.5 * usual

    jax.tree.map(near, found, expected, exact)


def entrance(p, x, layout):
    return linear(x, (p["q"], p["k"], p["up"]), layout, enter="tensor")


def leaving(p, x, layout):
    return linear(x, p["down"], layout, leave="tensor")


PERMUTE = re.compile(r"stablehlo\.collective_permute.*-> tensor<([0-9x]+)x(\w+)>")


CUT, WHOLE = P(None, "tensor"), P(None, None, "tensor")


@DIRECTIONS
@pytest.mark.parametrize(
    ("function", "width", "x_spec", "y_spec", "backward"),
    [(entrance, D, CUT, WHOLE, 2), (leaving, F, WHOLE, CUT, 1)],
    ids=["entrance", "exit"],
)
def test_only_chunks_of_the_residual_stream_move(
    function, width, x_spec, y_spec, backward, directions
):
    """Forward N - 1 chunks for all weights together. Backward of an entrance: as many of its input
    again, and of its gradient; of an exit: its gradient's, for both uses. Nothing is gathered or
    reduced."""
    tensor, layout = 4, overlapped(directions, tensor=4)
    params, x = make_params(kv_heads=4), jnp.ones((B, tensor * CHUNK, width), jnp.bfloat16)
    function = partial(function, layout=layout)
    in_specs = specs(params, layout.param_spec), x_spec

    def both_ways(params, x):
        y, transpose = jax.vjp(function, params, x)
        return transpose(y)

    programs = [(function, y_spec, 1), (both_ways, in_specs, 1 + backward)]
    for local, out_specs, rings in programs:
        text = shard_map(local, layout, in_specs, out_specs).lower(params, x).as_text()
        assert PERMUTE.findall(text) == [(f"{B}x{CHUNK}x{D}", "bf16")] * rings * (tensor - 1)
        assert {name for name, _ in collectives(text)} == {"collective_permute"}


@DIRECTIONS
def test_no_gathered_sequence_and_no_gathered_weight_is_kept(directions):
    layout, kept = overlapped(directions, fsdp=2, tensor=4), []
    params, x = make_params(kv_heads=4), jnp.ones((B, 4 * CHUNK, D))

    def local(params, x):
        function = partial(layers, layout=layout)
        kept[:] = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(function, *a)[1], params, x))
        return x

    spec = P(ZERO_AXES, "tensor")
    shard_map(local, layout, (specs(params, layout.param_spec), spec), spec).lower(params, x)
    shapes = {leaf.shape for leaf in kept}
    assert {(B // 2, CHUNK, D), (D // 2, F // 4), (H // 4, E, D // 2)} <= shapes
    assert not {(B // 2, 4 * CHUNK, D), (D, F // 4), (H // 4, E, D)} & shapes


def test_overlap_needs_sequence_parallelism():
    message = r"layout\.overlap=ring needs layout\.sequence_parallel=true.* write .*=none or"
    with pytest.raises(ValueError, match=message):
        LayoutConfig(overlap="ring", sequence_parallel=False)
