"""A backward pass in two: B, what the input's gradient needs, and W, the gradients of the weights,
which nobody waits for (zero bubble: arXiv 2401.10241).

Of a product y = x·w the gradient of w needs x and dy, nothing else. So the product takes a tap as
well: zeros in the shapes of x and dy, which it does not read, and whose gradient its VJP says is
(x, dy). B differentiates by inputs and taps; W, at any later time, multiplies what the taps gave,
and computes nothing again. Taps pass through scans and recomputation as arguments do. Layers are
stacked [n, ...], and so are their taps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Tap = tuple[jax.Array, tuple[jax.Array, ...]]
"""(x, dy of each weight)"""


class Product(NamedTuple):
    """One layer's product of x with several weights."""

    weights: tuple[int, ...]
    """numbers of the weights' leaves"""
    shards: tuple[jax.ShapeDtypeStruct, ...]
    """shapes of one layer's weights on this device"""
    tap: Any
    """shapes of one layer's `Tap`"""
    gradients: Callable[..., Sequence[jax.Array]]
    """(shapes of the shards, x, dys) -> the gradient of each shard"""


@partial(jax.tree_util.register_dataclass, data_fields=["shard", "tap"], meta_fields=["note"])
@dataclass(frozen=True)
class Tapped:
    """Stands in a `Param` where a weight's array does, and brings more with it."""

    shard: jax.Array
    """the array"""
    tap: Tap | None = None
    """of the product that it is the first weight of"""
    note: Note | None = None
    """where `find_products` wants to read of the product"""

    def __getitem__(self, index: Any) -> jax.Array:
        return self.shard[index]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shard.shape


@dataclass(frozen=True, eq=False)
class Note:
    """Where to write down what multiplies by a leaf."""

    number: int
    """of the leaf"""
    found: dict[tuple[int, ...], Product]
    """the products so far, by the numbers of their weights"""


def find_products(function: Callable[[Any], Any], tree: Any) -> list[Product]:
    """What `function(tree)` multiplies by leaves of the tree and can leave for W: each of those
    leaves is a weight in one product of a layer, and read nowhere else.
    """
    found: dict[tuple[int, ...], Product] = {}
    leaves, structure = jax.tree.flatten(tree)

    def traced(leaves: Sequence[jax.Array]) -> Any:
        notes = (Tapped(leaf, note=Note(number, found)) for number, leaf in enumerate(leaves))
        return function(jax.tree.unflatten(structure, notes))

    jax.eval_shape(traced, leaves)
    return list(found.values())


def note_product(
    weights: Sequence[Any],
    x: jax.Array,
    ys: Sequence[jax.Array],
    gradients: Callable[..., Sequence[jax.Array]],
) -> None:
    """Tell whoever looks for products of one by these values of Params."""
    notes = [weight.note for weight in weights if isinstance(weight, Tapped) and weight.note]
    if notes:
        arrays = tuple(weight[...] for weight in weights), (x, tuple(ys))
        shards, tap = jax.eval_shape(lambda arrays: arrays, arrays)
        numbers = tuple(note.number for note in notes)
        notes[0].found[numbers] = Product(numbers, shards, tap, gradients)


def make_taps(products: Sequence[Product], leaves: Sequence[jax.Array]) -> list[Tap]:
    """A tap for each product, of all layers in the stacked weights `leaves`."""
    return [
        jax.tree.map(lambda a, p=p: jnp.zeros((*_stack(p, leaves), *a.shape), a.dtype), p.tap)
        for p in products
    ]


def with_taps(products: Sequence[Product], leaves: Sequence[Any], taps: Sequence[Tap]) -> list[Any]:
    """The leaves, and with them each product's tap."""
    leaves = list(leaves)
    for product, tap in zip(products, taps, strict=True):
        first = product.weights[0]
        leaves[first] = Tapped(leaves[first], tap)
    return leaves


def weight_gradients(
    products: Sequence[Product], leaves: Sequence[jax.Array], taps: Sequence[Tap]
) -> dict[int, jax.Array]:
    """W: number -> gradient of every weight of the products, from what B gave for their taps."""

    def of_layer(product: Product, tap: Tap) -> tuple[jax.Array, ...]:
        return tuple(product.gradients(product.shards, *tap))

    grads: dict[int, jax.Array] = {}
    for product, tap in zip(products, taps, strict=True):
        of_layers = partial(of_layer, product)
        for _ in _stack(product, leaves):
            of_layers = partial(lax.map, of_layers)
        grads |= zip(product.weights, of_layers(tap), strict=True)
    return grads


def _stack(product: Product, leaves: Sequence[jax.Array]) -> tuple[int, ...]:
    leaf = leaves[product.weights[0]]
    return leaf.shape[: leaf.ndim - len(product.shards[0].shape)]
