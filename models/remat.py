"""What the backward pass finds saved, and what it computes again (activation recomputation,
arXiv 1604.06174, 2205.05198).

Tensors of a block that its backward pass may want carry names: `linear` names its input and its
products, the attention kernel its output and logsumexp. A policy is the list of those that are
saved; everything else inside the block is computed again, in the backward pass, from the saved ones
and from the block's input. Shapes: L layers, k = `remat.every`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from .config import ROUTE, RematConfig


def scan_layers(layer: Callable[[Any, Any], Any], x: Any, layers: Any, remat: RematConfig) -> Any:
    """x, an array or a tree of them, through `layer(x, p)` for each p of `layers`, which
    `group_layers` has made, under the policy.

    Where only each k-th layer is recomputed, layers are scanned in groups of k, the first k-1 of a
    group in a scan of their own: the program holds two layers, whatever L and k.
    """
    if remat.every == 1:
        return scan(recompute(layer, remat), x, layers)

    def first(x: Any, group: Any) -> Any:
        return scan(layer, x, jax.tree.map(lambda a: a[:-1], group))

    def last(x: Any, group: Any) -> Any:
        return layer(x, jax.tree.map(lambda a: a[-1], group))

    # saved pieces of the stacked parameters would be a second copy of them
    first = jax.checkpoint(first, prevent_cse=False, policy=_all_but_slices)
    last = recompute(last, remat)
    return scan(lambda x, group: last(first(x, group), group), x, layers)


def group_layers(layers: Any, remat: RematConfig) -> Any:
    """[L, ...] -> [L/k, k, ...]; as they are where k is 1."""
    if remat.every == 1:
        return layers
    return jax.tree.map(lambda a: a.reshape(-1, remat.every, *a.shape[1:]), layers)


def ungroup_layers(groups: Any, remat: RematConfig) -> Any:
    """What `group_layers` took, back again."""
    if remat.every == 1:
        return groups
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), groups)


def scan(layer: Callable[[Any, Any], Any], x: Any, layers: Any) -> Any:
    return lax.scan(lambda x, p: (layer(x, p), None), x, layers)[0]


def _all_but_slices(primitive: Any, *_, **__) -> bool:
    return primitive.name != "slice"


def recompute(layer: Callable[..., Any], remat: RematConfig) -> Callable[..., Any]:
    """`layer`, which saves for its backward pass its arguments and what the policy names."""
    if remat.saved is None:
        return layer
    policies = jax.checkpoint_policies
    if remat.policy == "offload":
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[ROUTE],
            names_which_can_be_offloaded=list(remat.saved),
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        policy = policies.save_only_these_names(ROUTE, *remat.saved)
    # inside a scan nothing can be merged across the recomputation, so no barrier is needed to
    # prevent it
    return jax.checkpoint(layer, prevent_cse=False, policy=policy)
