"""What the backward pass finds saved, and what it computes again (activation recomputation,
arXiv 1604.06174, 2205.05198).

Tensors of a block that its backward pass may want carry names: `linear` names its input and its
products, the attention kernel its output and logsumexp. A policy is the list of those that are
saved; everything else inside the block is computed again, in the backward pass, from the saved ones
and from the block's input. Shapes: R repeats of a period of layers, k = `remat.every`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .config import ROUTE, RematConfig

LayerRun = Callable[[Any, Any], tuple[Any, Any]]
"""(x, one repeat's data) -> x after one layer of the repeat, and what else there is to collect"""


def scan_repeats(
    period: Sequence[LayerRun], x: Any, repeats: Any, remat: RematConfig
) -> tuple[Any, list[Any]]:
    """x, an array or a tree of them, through the layers of a period, again for each of `repeats`,
    data [R, ...], under the policy. Returns x and what each layer has to collect, [R, ...].

    Where only each k-th repeat is recomputed, repeats are scanned in groups of k, the first k-1 of
    a group in a scan of their own: the program holds two periods, whatever R and k.
    """

    def run(wrap: Callable[[LayerRun], LayerRun], pick: Callable[[Any], Any], x: Any, given: Any):
        collected = []
        for layer in period:
            one = wrap(lambda x, given, layer=layer: layer(x, pick(given)))
            x, more = one(x, given)
            collected.append(more)
        return x, collected

    # pieces of the stacked parameters that were saved would be a second copy of them
    plain = (lambda layer: layer) if len(period) == 1 else _save_all_but_pieces
    whole = partial(run, plain if remat.saved is None else partial(recompute, remat=remat), same)
    if remat.every == 1:
        return lax.scan(whole, x, repeats)

    def group_of_repeats(x: Any, group: Any) -> tuple[Any, Any]:
        def first(x: Any, group: Any) -> tuple[Any, Any]:
            return lax.scan(partial(run, plain, same), x, jax.tree.map(lambda a: a[:-1], group))

        x, of_first = _save_all_but_pieces(first)(x, group)
        last = partial(jax.tree.map, lambda a: a[-1])
        x, of_last = run(partial(recompute, remat=remat), last, x, group)
        together = jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), of_first, of_last)
        return x, together

    groups = jax.tree.map(lambda a: a.reshape(-1, remat.every, *a.shape[1:]), repeats)
    x, collected = lax.scan(group_of_repeats, x, groups)
    return x, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), collected)


def same(a: Any) -> Any:
    return a


def _save_all_but_pieces(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose backward pass finds everything saved but the slices it has taken."""

    def saved(primitive: Any, *_, **__) -> bool:
        return primitive.name not in ("slice", "squeeze")

    return jax.checkpoint(function, prevent_cse=False, policy=saved)


def recompute_all(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which saves for its backward pass its arguments and each token's experts."""
    return recompute(function, RematConfig(policy="full"))


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
