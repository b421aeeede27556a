from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshwright.sharding.collectives import (
    all_gather,
    all_reduce,
    all_reduce_max,
    all_to_all,
    axis_index,
    reduce_scatter,
    shift,
)
from runs import collectives, layout_on, shard_map

PLACE = ("data", "fsdp", "tensor")
AXES = pytest.mark.parametrize("axes", ["fsdp", ("fsdp", "tensor"), ("data", "tensor"), "context"])


@pytest.fixture(scope="module")
def layout():
    return layout_on(data=2, fsdp=2, tensor=2)


def everywhere(function, layout, x):
    """`function` on every device's own x[data, fsdp, tensor]; the results in the same order."""

    def local(x):
        return function(x[0, 0, 0])[None, None, None]

    return np.asarray(shard_map(local, layout, P(*PLACE), P(*PLACE))(x))


def over(axes):
    """Dims of [data, fsdp, tensor] that are the named axes."""
    axes = (axes,) if isinstance(axes, str) else axes
    return tuple(PLACE.index(axis) for axis in axes if axis in PLACE)


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(0).normal(size=(2, 2, 2, 4, 3)).astype(np.float32)


@AXES
def test_all_reduce_adds_up(layout, x, axes):
    expected = np.broadcast_to(x.sum(over(axes), keepdims=True), x.shape)
    found = everywhere(lambda x: all_reduce(x, axes, layout), layout, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@AXES
def test_all_reduce_max_is_the_largest(layout, x, axes):
    expected = np.broadcast_to(x.max(over(axes), keepdims=True), x.shape)
    found = everywhere(lambda x: all_reduce_max(x, axes, layout), layout, x)
    np.testing.assert_array_equal(found, expected)


def gathered(x, axes, dim):
    """Pieces of all devices along the axes, the first axis major, joined along `dim`; on each."""
    result = np.empty(
        (*x.shape[:3], *np.concatenate([x[0, 0, 0]] * 2 ** len(over(axes)), dim).shape), x.dtype
    )
    for place in np.ndindex(x.shape[:3]):
        pieces = []
        for index in np.ndindex(*[2] * len(over(axes))):
            there = list(place)
            for dim_of_axis, i in zip(over(axes), index, strict=True):
                there[dim_of_axis] = i
            pieces.append(x[tuple(there)])
        result[place] = np.concatenate(pieces, dim)
    return result


@AXES
@pytest.mark.parametrize("dim", [0, 1])
def test_all_gather_joins_in_the_order_of_the_axes(layout, x, axes, dim):
    found = everywhere(lambda x: all_gather(x, axes, dim, layout), layout, x)
    np.testing.assert_array_equal(found, gathered(x, axes, dim))


@AXES
def test_reduce_scatter_gives_each_device_its_piece_of_the_sum(layout, x, axes):
    pieces = everywhere(lambda x: reduce_scatter(x, axes, 0, layout), layout, x)
    total = np.broadcast_to(x.sum(over(axes), keepdims=True), x.shape)
    np.testing.assert_allclose(gathered(pieces, axes, 0), total, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("by", [1, 2, -1])
def test_shift_goes_round_the_ring_and_transposes_to_the_shift_back(by):
    layout, x = layout_on(tensor=3), np.arange(3.0, dtype=np.float32)

    def local(x):
        (y, negative), transpose = jax.vjp(lambda x: shift((x, -x), "tensor", by, layout), x)
        return y, negative, *transpose((x, -2 * x))

    found = shard_map(local, layout, P("tensor"), P("tensor"))(x)
    there, back = np.roll(x, by), np.roll(x, -by)
    np.testing.assert_array_equal(found, [there, -there, 3 * back])


@pytest.mark.parametrize("group", [2, 3, 6])
def test_all_to_all_exchanges_one_dim_for_another_among_neighbours(group):
    """And transposes to the way back."""
    layout = layout_on(tensor=6)
    x = np.random.default_rng(0).normal(size=(6, 2, 12)).astype(np.float32)

    def local(x):
        exchange = partial(all_to_all, axis="tensor", group=group, layout=layout)
        y, transpose = jax.vjp(lambda x: exchange({"x": x[0]}, split=1, join=0)["x"], x)
        return y[None], transpose(y)[0]

    y, back = shard_map(local, layout, P("tensor"), P("tensor"))(x)
    for device in range(6):
        first = device // group * group
        whole = x[first : first + group].reshape(2 * group, 12)
        piece = np.split(whole, group, axis=1)[device - first]
        np.testing.assert_array_equal(y[device], piece)
    np.testing.assert_array_equal(back, x)


def test_axis_index_is_the_place_on_the_mesh(layout, x):
    def place(_):
        return jnp.stack([jnp.asarray(axis_index(axis, layout)) for axis in (*PLACE, "context")])

    for position in np.ndindex(2, 2, 2):
        assert tuple(everywhere(place, layout, x)[position]) == (*position, 0)


@pytest.mark.parametrize("axes", ["context", ("replica", "context"), ()])
def test_axes_of_size_one_give_the_input_and_move_nothing(layout, axes):
    def local(x):
        results = (
            all_reduce(x, axes, layout),
            all_reduce_max(x, axes, layout),
            all_gather(x, axes, 0, layout),
            reduce_scatter(x, axes, 0, layout),
            shift(x, "context", 1, layout),
            shift(x, "tensor", 2, layout),  # once round
            all_to_all(x, "tensor", 1, 0, 0, layout),
        )
        assert all(result is x for result in results)
        return results

    assert collectives(shard_map(local, layout, P(), P()).lower(jnp.ones(4)).as_text()) == []


def test_a_wide_axis_is_named_alone(layout):
    """The axis of size 1 beside it is left out; and the reader of collectives works."""

    def local(x):
        return all_gather(
            reduce_scatter(all_reduce(x, "fsdp", layout), ("context", "data"), 0, layout),
            "data",
            0,
            layout,
        )

    text = shard_map(local, layout, P(), P()).lower(jnp.ones(4, jnp.bfloat16)).as_text()
    names = ["all_reduce", "reduce_scatter", "all_gather"]
    assert collectives(text) == [(name, "bf16") for name in names]


@pytest.mark.parametrize(
    ("function", "partner"),
    [
        (
            lambda x, layout: all_reduce(x, "fsdp", layout),
            lambda x, layout: all_reduce(x, "fsdp", layout),
        ),
        (
            lambda x, layout: all_gather(x, ("fsdp", "tensor"), 0, layout),
            lambda x, layout: reduce_scatter(x, ("fsdp", "tensor"), 0, layout),
        ),
        (
            lambda x, layout: reduce_scatter(x, ("data", "tensor"), 0, layout),
            lambda x, layout: all_gather(x, ("data", "tensor"), 0, layout),
        ),
    ],
    ids=["all_reduce", "all_gather", "reduce_scatter"],
)
def test_each_transposes_to_its_partner(layout, x, function, partner):
    """And so <y, f(x)> summed over all devices equals <f'(y), x>."""

    def local(x):
        y, transpose = jax.vjp(lambda x: function(x, layout), x)
        cotangent = jnp.sin(y) + axis_index("tensor", layout)
        (pulled,) = transpose(cotangent)
        return jnp.stack(
            [pulled, partner(cotangent, layout), jnp.full(x.shape, jnp.sum(y * cotangent))]
        )

    found = everywhere(local, layout, x)
    pulled, expected, product = np.moveaxis(found, 3, 0)
    np.testing.assert_array_equal(pulled, expected)
    np.testing.assert_allclose((pulled * x).sum(), product[..., 0, 0].sum(), rtol=1e-4)


@pytest.mark.parametrize("sides", [(2, 4), (4, 2), (2, 2, 2)])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_scatter_by_sides_of_a_torus_is_that_over_the_axis(sides, dim):
    """On whole numbers, where the order of sums changes nothing."""
    whole = layout_on(fsdp=8)
    torus = replace(whole, sides=(("fsdp", sides),))
    x = np.random.default_rng(0).integers(-9, 9, (8, 16, 8)).astype(np.float32)

    def scattered(layout):
        def local(x):
            return reduce_scatter(x[0], "fsdp", dim, layout)[None]

        return np.asarray(shard_map(local, layout, P("fsdp"), P("fsdp"))(x))

    np.testing.assert_array_equal(scattered(torus), scattered(whole))
