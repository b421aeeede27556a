"""linear, lookup and fused_linear against plain products, forward and backward.

Shapes: B sequences, S tokens, D width, H query heads, K kv heads, E head width, V table rows.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.sharding.gradients import reduce_gradients
from meshwright.sharding.layout import specs
from meshwright.sharding.linear import fused_linear, linear, lookup, own_heads
from meshwright.sharding.rules import ZERO_AXES, Dim
from runs import collectives, layout_on, shard_map

B, S, D, H, E, V = 8, 8, 12, 4, 2, 16

LAYOUTS = {
    "one device": {"data": 1},
    "zero 3, sequence": {"fsdp": 2, "tensor": 4},
    "zero 3, no sequence": {"fsdp": 2, "tensor": 2, "sequence_parallel": False},
    "zero 1, sequence": {"data": 2, "fsdp": 2, "tensor": 2, "zero": 1},
    "zero 2, no sequence": {"fsdp": 4, "tensor": 2, "zero": 2, "sequence_parallel": False},
    "over data and fsdp": {"data": 2, "fsdp": 2, "rules": {"embed": ["data", "fsdp"]}},
}


def make_param(rng, axes, *shape, role="matrix"):
    return nnx.Param(rng.normal(size=shape).astype(np.float32), axes=axes, role=role)


def activation_spec(layout):
    return P(ZERO_AXES, "tensor" if layout.config.sequence_parallel else None)


def gradients(share, layout, params, x, *rest):
    """Gradients by (params, x) of the sum of all devices' shares, and what each returned beside.

    x [B, S, ...] has the layout of the residual stream; the arrays of `rest` are [B, S, ...].
    """
    in_specs = {"params": specs(params, layout.param_spec), "x": activation_spec(layout)}
    out_specs = in_specs | {"params": specs(params, layout.state_spec)}

    def local(inputs, *rest):
        grads = jax.grad(lambda inputs: share(inputs["params"], inputs["x"], *rest))(inputs)
        return reduce_gradients(grads, in_specs, out_specs, layout)

    rest_specs = (P(ZERO_AXES),) * len(rest)
    return shard_map(local, layout, (in_specs, *rest_specs), out_specs)(
        {"params": params, "x": x}, *rest
    )


def assert_close(tree, expected, tolerance=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max()),
        tree,
        expected,
    )


def sublayer(p, x, layout):
    """All that `linear` does: two weights and biases at one entrance, an exit with a bias."""
    q, k = linear(x, (p["q"], p["k"]), layout, biases=(p["q_bias"], p["k_bias"]), enter="tensor")
    mixed = q * jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    return linear(mixed, p["o"], layout, biases=(p["o_bias"],), leave="tensor")


def plain_sublayer(p, x):
    q = jnp.einsum("bsd,dhe->bshe", x, p["q"][...]) + p["q_bias"][...][None, None]
    k = jnp.einsum("bsd,dhe->bshe", x, p["k"][...]) + p["k_bias"][...][None, None]
    mixed = q * jnp.repeat(k, H // k.shape[2], axis=2)
    return jnp.einsum("bshe,hed->bsd", mixed, p["o"][...]) + p["o_bias"][...][None, None]


def sublayer_params(kv_heads):
    rng = np.random.default_rng(0)
    kv = ("kv_heads", "head_dim")
    return {
        "q": make_param(rng, ("embed", "heads", "head_dim"), D, H, E),
        "k": make_param(rng, ("embed", *kv), D, kv_heads, E),
        "o": make_param(rng, ("heads", "head_dim", "embed"), H, E, D),
        "q_bias": make_param(rng, ("heads", "head_dim"), H, E),
        "k_bias": make_param(rng, kv, kv_heads, E),
        "o_bias": make_param(rng, ("channel",), D),
    }


@pytest.mark.parametrize(
    ("kv_heads", "name"), [*((2, name) for name in LAYOUTS), (1, "zero 1, sequence")]
)
def test_linear_is_the_plain_product(kv_heads, name):
    """Two kv heads are cut over tensor=2 and repeated over tensor=4."""
    layout = layout_on([Dim("kv_heads", kv_heads, "model.kv_heads")], **LAYOUTS[name])
    params, rng = sublayer_params(kv_heads), np.random.default_rng(1)
    x, weight = rng.normal(size=(2, B, S, D)).astype(np.float32)
    spec = activation_spec(layout)
    copies = 1 if layout.config.sequence_parallel else layout.size("tensor")

    def share(p, x, weight):
        if layout.config.sequence_parallel and layout.size("tensor") > 1:
            tokens = x.shape[1]
            weight = lax.dynamic_slice_in_dim(weight, lax.axis_index("tensor") * tokens, tokens, 1)
        return jnp.sum(sublayer(p, x, layout) * weight) / copies

    forward = shard_map(
        partial(sublayer, layout=layout), layout, (specs(params, layout.param_spec), spec), spec
    )
    assert_close(forward(params, x), plain_sublayer(params, x))

    def plain_share(inputs):
        return jnp.sum(plain_sublayer(inputs["params"], inputs["x"]) * weight)

    expected = jax.grad(plain_share)({"params": params, "x": x})
    assert_close(gradients(share, layout, params, x, weight), expected)


def consume(y, rows, layout):
    """sum over tokens of weight·(y² summed over the table's rows), no device counted twice."""
    total = jnp.sum(y**2, axis=1)
    share = jnp.sum(total * rows["weight"])
    return share, 2 * y * rows["weight"][:, None], {"total": share, "chunks": jnp.float32(1)}


@pytest.mark.parametrize(
    ("name", "chunk"), [*((name, 5) for name in LAYOUTS), ("zero 3, sequence", 512)]
)
def test_both_ends_of_a_tied_table_are_plain_products(name, chunk):
    layout = layout_on(**LAYOUTS[name])
    rng = np.random.default_rng(2)
    params = {"table": make_param(rng, ("vocab", "embed"), V, D)}
    ids = rng.integers(0, V, (B, S), dtype=np.int32)
    x = rng.normal(size=(B, S, D)).astype(np.float32)
    weights = rng.random((B, S)).astype(np.float32)

    def share(p, x, ids, weights):
        x = x + lookup(ids, p["table"], layout, jnp.float32)
        rows = {"weight": weights}
        value, sums = fused_linear(
            x, p["table"], rows, layout, partial(consume, layout=layout), chunk
        )
        tokens = weights.size
        assert sums.keys() == {"total", "chunks"}
        # the sums are the chunks' added up, and carry no gradient
        return value + 0.0 * (sums["total"] + sums["chunks"] - -(-tokens // chunk))

    def plain_share(inputs):
        table = inputs["params"]["table"][...]
        return jnp.sum(((inputs["x"] + table[ids]) @ table.T) ** 2 * weights[..., None])

    expected = jax.grad(plain_share)({"params": params, "x": x})
    assert_close(gradients(share, layout, params, x, ids, weights), expected)


def test_fused_linear_returns_the_sums_of_all_chunks():
    layout, rng = layout_on(fsdp=2, tensor=2), np.random.default_rng(3)
    params = {"table": make_param(rng, ("vocab", "embed"), V, D)}
    x, weights = (
        rng.normal(size=(B, S, D)).astype(np.float32),
        rng.random((B, S)).astype(np.float32),
    )

    def local(p, x, weights):
        f = partial(fused_linear, x, p["table"], {"weight": weights}, layout)
        share, sums = f(partial(consume, layout=layout), 7)
        return jnp.stack(
            [
                lax.psum(value, ("fsdp", "tensor"))
                for value in (share, sums["total"], sums["chunks"])
            ]
        )

    in_specs = specs(params, layout.param_spec), activation_spec(layout), P(ZERO_AXES)
    share, total, chunks = shard_map(local, layout, in_specs, P())(params, x, weights)
    expected = np.sum((x @ params["table"][...].T) ** 2 * weights[..., None])
    np.testing.assert_allclose([share, total], expected, rtol=1e-6)
    assert chunks == 4 * -(-(4 * S) // 7)  # 32 tokens a device in chunks of 7, on four devices


@pytest.mark.parametrize("ids", [[-1, V, V + 100, -(2**31)]])
def test_ids_outside_the_table_give_zeros_and_no_gradient(ids):
    layout, rng = layout_on(tensor=4), np.random.default_rng(4)
    params = {"table": make_param(rng, ("vocab", "embed"), V, D)}
    ids = jnp.asarray([ids], jnp.int32)
    specs_in = (specs(params, layout.param_spec), P())
    spec = activation_spec(layout)
    embed = shard_map(
        lambda p, ids: lookup(ids, p["table"], layout, jnp.float32), layout, specs_in, spec
    )
    assert not np.any(embed(params, ids))

    def local(p, ids):
        return jax.grad(lambda p: lookup(ids, p["table"], layout, jnp.float32).sum())(p)

    grads = shard_map(local, layout, specs_in, specs_in[0])(params, ids)
    assert not np.any(grads["table"][...])


def lowered(layout, dtype, chunk=8):
    """StableHLO of loss and gradients of lookup, sublayer and fused_linear in `dtype`, and what
    the backward pass keeps of them, as shapes on one device."""
    rng = np.random.default_rng(5)
    params = sublayer_params(kv_heads=2) | {"table": make_param(rng, ("vocab", "embed"), V, D)}
    ids, weights = jnp.zeros((B, S), jnp.int32), jnp.ones((B, S))
    in_specs = specs(params, layout.param_spec)
    out_specs = specs(params, layout.state_spec)
    kept = []

    def local(params, ids, weights):
        def share(p):
            x = sublayer(p, lookup(ids, p["table"], layout, dtype), layout)
            return fused_linear(
                x, p["table"], {"weight": weights}, layout, partial(consume, layout=layout), chunk
            )[0]

        kept[:] = jax.tree.leaves(jax.eval_shape(lambda p: jax.vjp(share, p)[1], params))
        return reduce_gradients(jax.grad(share)(params), in_specs, out_specs, layout)

    rows = P(ZERO_AXES)
    text = (
        shard_map(local, layout, (in_specs, rows, rows), out_specs)
        .lower(params, ids, weights)
        .as_text()
    )
    return text, kept


@pytest.mark.parametrize("zero", range(4))
def test_gradients_are_reduced_in_f32_and_weights_travel_in_bf16(zero):
    """Case C12. Without tensor, all that is reduced is gradients and all that is gathered
    weights.
    """
    text, _ = lowered(layout_on(data=2, fsdp=4, zero=zero), jnp.bfloat16)
    found = collectives(text)
    assert {dtype for name, dtype in found if name != "all_gather"} == {"f32"}
    gathers = [dtype for name, dtype in found if name == "all_gather"]
    assert gathers == (["bf16"] * len(gathers) if zero == 3 else [])
    assert bool(gathers) == (zero == 3)


def test_under_tensor_only_activations_travel_in_bf16():
    """Case C12. With sequence parallelism activations are scattered: an all-reduce is one of
    gradients.
    """
    text, _ = lowered(layout_on(tensor=2), jnp.bfloat16)
    found = collectives(text)
    assert {dtype for name, dtype in found if name == "all_reduce"} == {"f32"}
    assert {dtype for name, dtype in found if name == "reduce_scatter"} == {"bf16"}


def test_tokens_are_added_up_in_f32():
    """Case C12. 301 times one, which bf16 rounds to 300 or 302."""
    layout, params = layout_on(), sublayer_params(kv_heads=2)
    ids, x = jnp.zeros((7, 43), jnp.int32), jnp.ones((7, 43, D), jnp.bfloat16)
    params["table"] = make_param(np.random.default_rng(6), ("vocab", "embed"), V, D)

    def loss(p):
        y = linear(x, p["q"], layout, biases=(p["q_bias"],))
        y = y.sum((2, 3), dtype=jnp.float32) + lookup(ids, p["table"], layout, x.dtype).sum(2)
        return y.sum(dtype=jnp.float32)

    grads = jax.jit(jax.grad(loss))(params)
    for leaf in (grads["q"][...], grads["q_bias"][...], grads["table"][...][0]):
        assert np.all(leaf == 301)


def test_no_gathered_weight_and_no_gathered_sequence_is_kept():
    _, kept = lowered(layout_on(fsdp=2, tensor=2), jnp.float32)
    shapes = {leaf.shape for leaf in kept}
    assert {(D // 2, H // 2, E), (V // 2, D // 2), (B // 2, S // 2, D)} <= shapes  # shards
    gathered = {(D, H // 2, E), (D, 1, E), (H // 2, E, D), (V // 2, D), (B // 2, S, D)}
    assert not gathered & shapes


def test_full_products_never_exist():
    chunk, tokens = 8, B * S
    text, _ = lowered(layout_on(), jnp.float32, chunk)
    assert f"tensor<{chunk}x{V}xf32>" in text
    assert f"tensor<{tokens}x{V}x" not in text and f"tensor<{B}x{S}x{V}x" not in text


@pytest.mark.parametrize(("kv_heads", "tensor"), [(1, 4), (2, 8), (3, 2), (6, 4), (4, 6)])
def test_each_tensor_shard_takes_the_kv_heads_of_its_queries(kv_heads, tensor):
    """Of copies that are as many as the least common multiple, in order."""
    layout = layout_on([Dim("kv_heads", kv_heads, "model.kv_heads")], tensor=tensor)
    axes = ("embed", "kv_heads")
    weight = jnp.arange(2.0)[:, None] * 10 + jnp.arange(float(kv_heads))[None]
    own = shard_map(partial(own_heads, axes=axes, layout=layout), layout, P(), P(None, "tensor"))
    copies = math.lcm(kv_heads, tensor)
    np.testing.assert_array_equal(own(weight), np.repeat(weight, copies // kv_heads, axis=1))


def test_one_weight_gives_one_array_and_a_bias_may_be_missing():
    layout, params = layout_on(), sublayer_params(kv_heads=2)
    x = jnp.ones((B, S, D))
    alone = linear(x, params["q"], layout)
    first, second = linear(x, (params["q"], params["k"]), layout, biases=(None, params["k_bias"]))
    np.testing.assert_array_equal(alone, first)
    np.testing.assert_allclose(
        second, linear(x, params["k"], layout) + params["k_bias"][...][None, None], rtol=1e-6
    )
    with pytest.raises(ValueError, match="zip"):
        linear(x, (params["q"], params["k"]), layout, biases=(None,))
