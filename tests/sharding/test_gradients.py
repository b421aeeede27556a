import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from meshwright.sharding.config import MESH_AXES, LayoutConfig
from meshwright.sharding.gradients import reduce_gradients, scatter_gradients
from meshwright.sharding.layout import make_layout
from runs import collectives, layout_on, shard_map

SHAPE = (4, 4)
CASES = {  # in_spec, out_spec, what a share is reduced by
    "summed over all": (P(), P(), ["all_reduce"]),
    "owned over tensor": (P(None, "tensor"), P(None, "tensor"), ["all_reduce"]),
    "ZeRO-3": (P("fsdp"), P("fsdp"), ["all_reduce"]),
    "ZeRO-1": (P(None, "tensor"), P("fsdp", "tensor"), ["reduce_scatter", "all_reduce"]),
    "two axes": (P(), P(("data", "fsdp"), None), ["reduce_scatter", "all_reduce"]),
    "two axes, one there": (P("data"), P(("data", "fsdp")), ["reduce_scatter", "all_reduce"]),
    "nothing left": (P("data", "tensor"), P(("data", "fsdp"), "tensor"), ["reduce_scatter"]),
}


@pytest.fixture(scope="module")
def layout():
    return layout_on(data=2, fsdp=2, tensor=2)


def reduce(shares, in_specs, out_specs, layout):
    """Lists of shares [data, fsdp, tensor, *local shape] -> whole reduced gradients."""
    place = P("data", "fsdp", "tensor")

    def local(shares):
        return reduce_gradients([share[0, 0, 0] for share in shares], in_specs, out_specs, layout)

    return shard_map(local, layout, ([place] * len(shares),), out_specs)


def local_shape(spec):
    entries = (*spec, None, None)[:2]
    return tuple(n // 2 if entry else n for n, entry in zip(SHAPE, entries, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_shares_are_added_over_every_axis_the_parameter_does_not_name(layout, name):
    in_spec, out_spec, expected_collectives = CASES[name]
    rng = np.random.default_rng(0)
    shares = rng.normal(size=(2, 2, 2, *local_shape(in_spec))).astype(np.float32)
    function = reduce([shares], [in_spec], [out_spec], layout)
    found = collectives(function.lower([shares]).as_text())
    assert [name for name, _ in found] == expected_collectives

    owned = (*in_spec, None, None)[:2]
    expected = np.zeros(SHAPE, np.float32)
    for place in np.ndindex(2, 2, 2):
        at = dict(zip(("data", "fsdp", "tensor"), place, strict=True))
        where = tuple(
            slice(None) if axis is None else slice(at[axis] * 2, at[axis] * 2 + 2) for axis in owned
        )
        expected[where] += shares[place]
    np.testing.assert_allclose(function([shares])[0], expected, rtol=1e-5, atol=1e-6)


def test_leaves_that_share_axes_meet_in_one_collective(layout):
    names = ["summed over all", "owned over tensor", "owned over tensor", "summed over all"]
    in_specs, out_specs, _ = zip(*(CASES[name] for name in names), strict=True)
    shares = [np.ones((2, 2, 2, *local_shape(spec)), np.float32) for spec in in_specs]
    function = reduce(shares, list(in_specs), list(out_specs), layout)
    compiled = function.lower(shares).compile().as_text()
    # the instruction's result is a tuple of leaves
    assert len(re.findall(r" all-reduce(?:-start)?\(", compiled)) == 2
    for leaf, name in zip(function(shares), names, strict=True):
        np.testing.assert_array_equal(leaf, 8 if name == "summed over all" else 4)


def test_scatter_alone_leaves_the_other_axes_partial(layout):
    share = jnp.arange(16, dtype=jnp.float32).reshape(SHAPE)

    def local(share):
        return scatter_gradients([share], [P()], [P("fsdp")], layout)[0]

    text = shard_map(local, layout, P(), P("fsdp")).lower(share).as_text()
    assert [name for name, _ in collectives(text)] == ["reduce_scatter"]
    np.testing.assert_array_equal(shard_map(local, layout, P(), P("fsdp"))(share), 2 * share)


def test_gradients_of_replicas_never_meet():
    """The config refuses replicas for now; the rule is there already."""
    mesh = Mesh(np.reshape(jax.devices()[:4], (2, 1, 2, 1, 1, 1, 1)), MESH_AXES)
    layout = make_layout(LayoutConfig(), mesh, [])

    def local(share):
        return reduce_gradients(share, P(), P(), layout)

    each = shard_map(local, layout, P(("replica", "data")), P("replica"))
    np.testing.assert_array_equal(each(jnp.array([1.0, 2.0, 3.0, 4.0])), [3.0, 7.0])
