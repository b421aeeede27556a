"""Layers in the model's order, as checkpoints have them, and in the order in which stages hold
them, as a run's state has them: so any pipeline's checkpoint opens in any other layout, or in none.

With one chunk on a stage, and where stages divide the layers, both are the same and nothing moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...models.pattern import held
from ...models.transformer import Layers, Transformer
from ...sharding.layout import Layout, is_param
from ..config import Config
from ..state import State, abstract_state, state_shardings, with_shardings


def model_order_shapes(config: Config, layout: Layout) -> State:
    """Shapes and shardings of a State in the model's order: a target to restore into. Where stages
    do not divide the layers of a kind, each holds them all.
    """
    order = held(config.model)
    if any(len(numbers) % layout.size("pipe") for numbers in order.values()):
        layout = layout.with_rules(layers=())
    state = abstract_state(config, order)
    return with_shardings(state, state_shardings(state, layout))


def in_model_order(tree: Any, target: Any, config: Config) -> Any:
    """A State, or a part of it, with layers 0, 1, … and no padding. target: its shapes and
    shardings then.
    """
    return _reorder(tree, config.held_layers(), held(config.model), target)


def in_stage_order(tree: Any, target: Any, config: Config) -> Any:
    """Undoes `in_model_order`; padding is zero."""
    return _reorder(tree, held(config.model), config.held_layers(), target)


def without_stages(
    params: Transformer, config: Config, layout: Layout
) -> tuple[Transformer, Layout]:
    """Parameters in the model's order on the same devices, none of which is a stage: each sees all
    layers.
    """
    if layout.size("pipe") == 1:
        return params, layout
    layout = layout.with_rules(layers=(), vocab=("tensor",))
    state = abstract_state(config, held(config.model))
    target = with_shardings(state, state_shardings(state, layout)).params
    params = in_model_order(params, target, config)
    return jax.device_put(params, jax.tree.map(lambda leaf: leaf.sharding, target)), layout


def _reorder(
    tree: Any, before: Mapping[str, Sequence[int]], after: Mapping[str, Sequence[int]], target: Any
) -> Any:
    """The tree with the layers of each kind in another order; zeros for padding."""
    if before == after:
        return tree

    def one(node: Any) -> Any:
        if not isinstance(node, Layers):
            return node
        node = jax.tree.map(lambda leaf: leaf, node)
        for kind, numbers in after.items():
            place = {number: at for at, number in enumerate(before[kind])}
            rows = [place.get(number, len(before[kind])) for number in numbers]
            setattr(node, kind, _take(getattr(node, kind), rows))
        return node

    def reorder(tree: Any) -> Any:
        return jax.tree.map(one, tree, is_leaf=lambda node: isinstance(node, Layers))

    shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
    return jax.jit(reorder, out_shardings=shardings)(tree)


def _take(stack: Any, rows: Sequence[int]) -> Any:
    """Rows of all that is stacked; zeros for one past the end."""

    def one(node: Any) -> Any:
        if not is_param(node):
            return node

        def take(leaf: jax.Array) -> jax.Array:
            if leaf.ndim == len(node.axes):
                return leaf
            return jnp.take(leaf, jnp.asarray(rows), axis=0, mode="fill", fill_value=0)

        return jax.tree.map(take, node)  # empty where a rule for other parameters keeps its state

    return jax.tree.map(one, stack, is_leaf=is_param)
