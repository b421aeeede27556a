"""What F, B and W of a chunk of layers compute, traced once: a forward pass that hands over what
its backward pass needs, that backward pass, and the gradients it leaves for later.

What B needs and could make from the parameters alone, such as a layer's slice of a stack or a
weight in another dtype, F does not hand over: B makes it again, since a pipeline would keep it for
every micro-batch that waits. Which values these are follows from the data flow of the traced
program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.interpreters import partial_eval

from ..layout import is_param
from ..taps import Product, make_taps, weight_gradients, with_taps


class Gradients(NamedTuple):
    """Of some of a chunk's parameters."""

    numbers: Sequence[int]
    """which of the chunk's leaves"""
    tree: Any
    """the chunk with those leaves alone"""


@dataclass(frozen=True)
class Passes:
    """The passes of one chunk; chunks that hold the same layers share them."""

    products: Sequence[Product]
    """products by weights whose gradients B leaves for W; empty: B computes all"""
    _forward: Callable[..., list[jax.Array]]
    """leaves of (chunk, x, piece, depth) -> leaves of (y, sums), then what F hands over"""
    _outputs: Any
    """tree structure of (y, sums)"""
    _remade: Callable[..., list[jax.Array]]
    """leaves of chunk -> what B makes again"""
    _is_remade: Sequence[bool]
    """of each value that the backward pass needs"""
    _backward: Any
    """tree structure of the backward pass over what it needs"""

    def forward(self, chunk: Any, x: jax.Array, piece: Any, depth: Any):
        """-> y, sums to log, what `backward` needs beside the parameters."""
        leaves = self._forward(*jax.tree.leaves((chunk, x, piece, depth)))
        count = self._outputs.num_leaves
        y, sums = jax.tree.unflatten(self._outputs, leaves[:count])
        return y, sums, leaves[count:]

    def backward(
        self, chunk: Any, stash: Sequence[jax.Array], dy: jax.Array, active: jax.Array
    ) -> tuple[Gradients, Any, jax.Array]:
        """What F handed over and dy -> gradients, what W needs, dx; all zero where not active."""
        params = jax.tree.leaves(chunk)
        kept, remade = iter(stash), iter(self._remade(*params))
        needed = [next(remade if again else kept) for again in self._is_remade]
        masked = jnp.where(active, dy, jnp.zeros_like(dy)), active.astype(jnp.float32)
        some, taps, dx = jax.tree.unflatten(self._backward, needed)(masked)
        return Gradients(_at_once(params, self.products), some), taps, dx

    def weights(self, chunk: Any, taps: Any) -> Gradients:
        """What B left -> gradients."""
        grads = weight_gradients(self.products, jax.tree.leaves(chunk), taps)
        later = sorted(grads)
        structure = jax.tree.structure(_only(chunk, later))
        return Gradients(later, jax.tree.unflatten(structure, [grads[n] for n in later]))


def trace_forward(layers: Callable[..., Any], chunk: Any, x: Any, piece: Any) -> Passes:
    """Passes of a schedule without B. layers: as in `Stages`; the others tell of shapes alone."""

    def forward(chunk: Any, x: jax.Array, piece: Any, depth: Any) -> Any:
        (y, _), sums = layers(chunk, x, piece, depth)
        return y, sums

    program, shapes = jax.make_jaxpr(forward, return_shape=True)(chunk, x, piece, jnp.int32(0))
    outputs = jax.tree.structure(shapes)
    return Passes([], jaxpr_as_fun(program), outputs, lambda *_: [], (), None)


def trace_passes(
    layers: Callable[..., Any], products: Sequence[Product], chunk: Any, x: Any, piece: Any
) -> Passes:
    """Passes of a schedule that trains. products: those whose gradients B leaves for W."""
    backwards = []

    def forward(chunk: Any, x: jax.Array, piece: Any, depth: Any) -> Any:
        params, structure = jax.tree.flatten(chunk)
        numbers = _at_once(params, products)

        def run(some: Any, taps: Any, x: jax.Array) -> Any:
            leaves = list(params)
            for number, leaf in zip(numbers, jax.tree.leaves(some), strict=True):
                leaves[number] = leaf
            leaves = with_taps(products, leaves, taps)
            return layers(jax.tree.unflatten(structure, leaves), x, piece, depth)

        given = _only(chunk, numbers), make_taps(products, params), x
        (y, _), vjp, sums = jax.vjp(run, *given, has_aux=True)
        needed, backward = jax.tree.flatten(vjp)
        backwards.append(backward)
        return (y, sums), needed

    program, (shapes, needed) = jax.make_jaxpr(forward, return_shape=True)(
        chunk, x, piece, jnp.int32(0)
    )
    outputs, params = jax.tree.structure(shapes), len(jax.tree.leaves(chunk))
    made = outputs.num_leaves
    pure = _without_effects(program)
    is_remade = [_follows_from(pure, made + number, params) for number in range(len(needed))]
    handed_over = [True] * made + [not again for again in is_remade]
    remake = _of_first(_pruned(pure, [False] * made + is_remade), params)
    return Passes(
        products,
        jaxpr_as_fun(_pruned(program, handed_over)),
        outputs,
        jaxpr_as_fun(remake),
        is_remade,
        backwards[0],
    )


def _at_once(params: Sequence[Any], products: Sequence[Product]) -> list[int]:
    """Numbers of the parameters whose gradients B computes."""
    later = [number for product in products for number in product.weights]
    assert len(set(later)) == len(later)
    return [number for number in range(len(params)) if number not in later]


def _only(tree: Any, numbers: Sequence[int]) -> Any:
    """The tree with no Params but those."""
    params, structure = jax.tree.flatten(tree, is_leaf=is_param)
    kept = (param if number in numbers else None for number, param in enumerate(params))
    return jax.tree.unflatten(structure, kept)


def _pruned(program: ClosedJaxpr, outputs: Sequence[bool]) -> ClosedJaxpr:
    """The program with some of its outputs, and all of its inputs."""
    jaxpr, _ = partial_eval.dce_jaxpr(program.jaxpr, list(outputs), instantiate=True)
    return ClosedJaxpr(jaxpr, program.consts)


def _of_first(program: ClosedJaxpr, count: int) -> ClosedJaxpr:
    """The program, which reads its first inputs alone, of those inputs."""
    jaxpr = program.jaxpr
    return ClosedJaxpr(jaxpr.replace(invars=jaxpr.invars[:count]), program.consts)


def _without_effects(program: ClosedJaxpr) -> ClosedJaxpr:
    """The program without what prints or calls back, and without collectives: they run once, in F,
    and what they give is handed over.
    """
    pure = [eqn for eqn in program.jaxpr.eqns if not eqn.effects]
    return ClosedJaxpr(program.jaxpr.replace(eqns=pure), program.consts)


def _follows_from(program: ClosedJaxpr, output: int, params: int) -> bool:
    """Whether an output follows from the first inputs, the parameters, alone: neither from others
    nor from what the program has closed over.
    """
    jaxpr = program.jaxpr
    wanted = [number == output for number in range(len(jaxpr.outvars))]
    needed, _ = partial_eval.dce_jaxpr(jaxpr, wanted, instantiate=True)
    known = {*needed.invars[:params], *(var for eqn in needed.eqns for var in eqn.outvars)}
    read = [var for eqn in needed.eqns for var in eqn.invars] + needed.outvars
    return all(isinstance(var, Literal) or var in known for var in read)
