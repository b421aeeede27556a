"""Which dims of a parameter are the two sides of its matrix."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from meshwright.trainer.optim.matrix_sides import sides


def test_sides_of_a_matrix_merge_heads_and_leave_stacks_and_experts_out():
    def of(*axes):
        return sides(nnx.Param(jnp.zeros(()), axes=axes, role="matrix"))

    assert of("embed", "mlp") == ((-2,), (-1,))
    assert of("embed", "kv_heads", "head_dim") == ((-3,), (-2, -1))
    assert of("heads", "head_dim", "embed") == ((-3, -2), (-1,))
    assert of("expert", "embed", "mlp") == ((-2,), (-1,))
    assert of("channel") is of("head_dim") is of("heads", "head_dim") is None
