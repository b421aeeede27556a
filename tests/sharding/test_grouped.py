"""Products with many experts' matrices, in blocks and by `ragged_dot`, beside a plain product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from meshwright.sharding import grouped
from meshwright.sharding.grouped import Weights, block_sizes, group_rows, grouped_linear
from runs import layout_on

LAYOUT = layout_on()
WIDTH, HIDDEN = 6, 10

CASES = {
    # choices of a token, experts of the choices
    "even": (2, 4, [0, 1, 2, 3] * 8),
    "some experts empty, some choices void": (1, 5, [4] * 20 + [1] * 3 + [5] * 6 + [4] * 8),
    "all by one": (2, 4, [2] * 62),
    "all void": (1, 3, [3] * 9),
    "one expert": (3, 1, [0] * 33),
}


def draw(case):
    width, count, experts = CASES[case]
    rng = np.random.default_rng(0)
    shapes = (len(experts) // width, WIDTH), (count, WIDTH, HIDDEN), (count, WIDTH, HIDDEN)
    arrays = (*shapes, (count, HIDDEN, WIDTH), (len(experts) // width, WIDTH))
    experts = rng.permutation(np.array(experts))
    return experts, *(rng.normal(size=shape).astype(np.float32) for shape in arrays)


def through_groups(x, first, second, third, *, experts):
    """Two products of tokens, and one of their rows' product that leaves."""
    groups = group_rows(jnp.asarray(experts), first.shape[0])
    pair = Weights((first, second), ((), ()))
    a, b = grouped_linear(x, pair, groups, LAYOUT, enter=True)
    (y,) = grouped_linear(a * b, Weights((third,), ((),)), groups, LAYOUT, leave=x.shape[0])
    return y


def plainly(x, first, second, third, *, experts):
    rows = jnp.repeat(x, len(experts) // len(x), axis=0)
    own = jax.nn.one_hot(experts, first.shape[0])  # of none: zeros
    a, b = (jnp.einsum("nd,ne,edf->nf", rows, own, weight) for weight in (first, second))
    y = jnp.einsum("nf,ne,efd->nd", a * b, own, third)
    return y.reshape(len(x), -1, y.shape[1]).sum(axis=1)


def value_and_gradients(function, experts, arrays, weigh):
    def total(*arrays):
        y = function(*arrays, experts=experts)
        return jnp.sum(y * weigh), y

    (_, y), gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3), has_aux=True))(
        *arrays
    )
    return y, *gradients


@pytest.mark.parametrize("form", ["blocks", "ragged"])
@pytest.mark.parametrize("case", CASES)
def test_rows_meet_their_experts_matrices(case, form, monkeypatch):
    if form == "ragged":  # what other platforms run

        def choose(*arguments, cpu, default):
            return default(*arguments)

        monkeypatch.setattr(grouped.lax, "platform_dependent", choose)
    experts, *arrays, weigh = draw(case)
    found = value_and_gradients(through_groups, experts, arrays, weigh)
    expected = value_and_gradients(plainly, experts, arrays, weigh)
    for a, b in zip(found, expected, strict=True):
        assert_allclose(a, b, rtol=1e-5, atol=1e-5 * max(float(jnp.max(jnp.abs(b))), 1.0))


def test_half_precision_adds_up_in_f32():
    experts, x, first, *_ = draw("even")

    def total(x, first):
        groups, weights = group_rows(jnp.asarray(experts), 4), Weights((first,), ((),))
        (y,) = grouped_linear(x, weights, groups, LAYOUT, enter=True, leave=len(x))
        assert y.dtype == jnp.float32
        return jnp.sum(y)

    x = jnp.asarray(x, jnp.bfloat16)
    dx, dfirst = jax.jit(jax.grad(total, argnums=(0, 1)))(x, first)
    rows = np.repeat(np.asarray(x, np.float32), 2, axis=0)
    sums = np.stack([rows[experts == expert].sum(axis=0) for expert in range(4)])
    assert dx.dtype == jnp.bfloat16 and dfirst.dtype == jnp.float32
    assert_allclose(dfirst, np.broadcast_to(sums[..., None], dfirst.shape), rtol=1e-6, atol=1e-6)


def test_what_nobody_chose_cannot_overflow():
    """In f16 the last token times the last expert is infinite; it chose none."""
    experts = np.array([0, 0, 1])
    rng = np.random.default_rng(0)
    weights = [np.abs(rng.normal(size=(1, 4, 4))).astype(np.float32) for _ in range(3)]
    weights[0] *= 100
    x = np.stack([np.ones(4), np.ones(4) / 2, np.full(4, 6e4)]).astype(np.float16)
    with np.errstate(over="ignore"):
        assert np.isinf((x[2].astype(np.float32) @ weights[0][0]).astype(np.float16)).all()
    weigh = np.ones((3, 4), np.float32)
    for array in value_and_gradients(through_groups, experts, (x, *weights), weigh):
        assert np.isfinite(array).all() and array.any()


@pytest.mark.parametrize("choices, count", [(1, 1), (37, 5), (2048, 16), (8192, 8), (33, 1)])
def test_few_blocks_cover_an_even_share(choices, count):
    sizes = block_sizes(choices, count)
    assert all(size % sizes[-1] == 0 for size in sizes) and list(sizes) == sorted(sizes)[::-1]
    assert sizes[0] <= choices + sizes[-1]  # what rows have room for
    share = -(-choices // count)
    assert sizes[0] >= min(share, 256)
