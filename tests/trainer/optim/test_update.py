"""Clipping and the norm of gradients that devices hold in parts; the update of those parts."""

from __future__ import annotations

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from meshwright.sharding.layout import specs
from meshwright.trainer.optim.update import clip
from meshwright.trainer.state import lay_out
from runs import SMALL, first_devices, make_config

ONE, EIGHT = (), ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")


def grads_of_norm(norm: float):
    """Of three shapes, cut over one axis, two and none; all entries equal, so that nothing is
    rounded in the squares.
    """
    shapes = {"a": (("embed", "channel"), (2, 3)), "b": (("embed", "mlp"), (2, 4)),
              "c": (("channel",), (2,))}  # fmt: skip
    return {
        name: nnx.Param(jnp.full(shape, norm / 4), axes=axes)
        for name, (axes, shape) in shapes.items()
    }


def clipped(grads, limit: float | None, mesh):
    config = make_config(*SMALL, *mesh)
    layout = lay_out(config, first_devices(config))
    cuts = specs(grads, layout.state_spec)
    run = jax.shard_map(
        partial(clip, limit=limit, layout=layout),
        mesh=layout.mesh, in_specs=(cuts,), out_specs=(cuts, P()), check_vma=False,
    )  # fmt: skip
    return jax.jit(run)(grads)


@pytest.mark.parametrize("mesh", [ONE, EIGHT])
@pytest.mark.parametrize("limit", [4.0, 4.5, 1e30, None])
def test_at_or_below_the_limit_gradients_stay_bitwise(limit, mesh):
    grads = grads_of_norm(4.0)
    found, norm = clipped(grads, limit, mesh)
    assert norm == 4.0
    chex.assert_trees_all_equal(found, grads)


@pytest.mark.parametrize("mesh", [ONE, EIGHT])
@pytest.mark.parametrize("limit", [1.0, 0.25, 3.999])
def test_above_the_limit_all_gradients_shrink_alike(limit, mesh):
    grads = grads_of_norm(4.0)
    found, norm = clipped(grads, limit, mesh)
    assert norm == 4.0
    expected = jax.tree.map(lambda grad: grad * limit / 4, grads)
    chex.assert_trees_all_close(found, expected, rtol=1e-6)


def test_gradients_of_zero_stay_zero():
    found, norm = clipped(grads_of_norm(0.0), 1.0, EIGHT)
    assert norm == 0.0
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(found))
