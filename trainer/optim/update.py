"""Clipping and the update, inside the step's `shard_map`: each device works on the parts of
gradients, moments and parameters that it holds.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ...sharding.collectives import all_reduce
from ...sharding.gradients import reduced_axes
from ...sharding.layout import Layout, is_param, map_params, spec_axes
from ...sharding.zero import own_parts, whole_params


def clip(grads: Any, limit: float | None, layout: Layout) -> tuple[Any, jax.Array]:
    """Scale all gradients so that their global norm is at most `limit`; returns them and the norm
    before. One all-reduce of a number.
    """
    norm = global_norm(grads, layout)
    if limit is None:
        return grads, norm
    scale = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30))
    return jax.tree.map(lambda grad: grad * scale, grads), norm


def global_norm(grads: Any, layout: Layout) -> jax.Array:
    """Local: that of whole gradients, of which `Layout.state_spec` gives this device parts."""
    everywhere = reduced_axes(layout)

    def share(grad: nnx.Param) -> jax.Array:
        """This device's part of the sum of squares; what several hold alike, they share."""
        value = grad.get_value()
        spec = layout.state_spec(grad.axes, value.ndim - len(grad.axes))
        copies = layout.size([axis for axis in everywhere if axis not in spec_axes(spec)])
        return jnp.sum(value * value) / copies

    shares = jax.tree.leaves(jax.tree.map(share, grads, is_leaf=is_param))
    return jnp.sqrt(all_reduce(sum(shares), everywhere, layout))


def update_params(
    optimizer: optax.GradientTransformationExtraArgs,
    grads: Any,
    opt: Any,
    params: Any,
    lr: jax.Array,
    layout: Layout,
) -> tuple[Any, Any, Any]:
    """Local: the next parameters as they rest, this device's own parts of them, and the optimizer's
    next state.
    """
    own = own_parts(params, layout)
    updates, opt = optimizer.update(grads, opt, own, lr=lr)
    own = map_params(lambda param, update: param.get_value() + update, own, updates)
    return whole_params(own, layout), own, opt
