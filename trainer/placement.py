"""Layers in the model's order, as checkpoints have them, and in the order in which stages hold
them, as a run's state has them: so any pipeline's checkpoint opens in any other layout, or in none.

With one chunk on a stage, and where stages divide the layers, both are the same and nothing moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..models.transformer import Transformer
from ..sharding.layout import Layout, is_param
from .config import Config
from .state import State, abstract_state, state_shardings, with_shardings


def model_order_shapes(config: Config, layout: Layout) -> State:
    """Shapes and shardings of a State in the model's order: a target to restore into. Where stages
    do not divide the layers, each holds them all.
    """
    if config.model.layers % layout.size("pipe"):
        layout = layout.with_rules(layers=())
    state = abstract_state(config, config.model.stacked)
    return with_shardings(state, state_shardings(state, layout))


def in_model_order(tree: Any, target: Any, config: Config) -> Any:
    """A State, or a part of it, with layers 0, 1, … and no padding. target: its shapes and
    shardings then.
    """
    held, layers = config.stacked_layers(), config.model.stacked
    return tree if held == [*layers] else _take(tree, [held.index(n) for n in layers], target)


def in_stage_order(tree: Any, target: Any, config: Config) -> Any:
    """What `in_model_order` took, back again; padding is zero."""
    held = config.stacked_layers()
    return tree if held == [*config.model.stacked] else _take(tree, held, target)


def without_stages(
    params: Transformer, config: Config, layout: Layout
) -> tuple[Transformer, Layout]:
    """Parameters in the model's order on the same devices, none of which is a stage: each sees all
    layers.
    """
    if layout.size("pipe") == 1:
        return params, layout
    layout = layout.with_rules(layers=(), vocab=("tensor",))
    state = abstract_state(config, config.model.stacked)
    target = with_shardings(state, state_shardings(state, layout)).params
    params = in_model_order(params, target, config)
    return jax.device_put(params, jax.tree.map(lambda leaf: leaf.sharding, target)), layout


def _take(tree: Any, numbers: Sequence[int], target: Any) -> Any:
    """The layers with these numbers; zeros where there is none."""

    def one(node: Any) -> Any:
        if not is_param(node):
            return node

        def take(leaf: jax.Array) -> jax.Array:
            if leaf.ndim == len(node.axes):
                return leaf
            return jnp.take(leaf, jnp.asarray(numbers), axis=0, mode="fill", fill_value=0)

        return jax.tree.map(take, node)  # empty where a rule for other parameters keeps its state

    shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
    return jax.jit(lambda tree: jax.tree.map(one, tree, is_leaf=is_param), out_shardings=shardings)(
        tree
    )
