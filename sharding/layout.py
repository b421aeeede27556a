"""Layout: a mesh, the resolved rule table and the ZeRO stage in one frozen value that every
function of `sharding/` takes. It turns logical axes into `PartitionSpec`s for parameters, optimizer
state and batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .config import LayoutConfig
from .mesh import torus_sides
from .rules import ZERO_AXES, Dim, Resolved, resolve


@dataclass(frozen=True)
class Layout:
    mesh: Mesh
    resolved: Resolved
    config: LayoutConfig = field(hash=False)  # it holds lists
    reduce: Any
    """dtype in which gradients travel"""
    sides: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """mesh axis -> the sides of the torus that it goes along, where there are several"""

    @cached_property
    def _rules(self) -> dict[str, tuple[str, ...]]:
        return dict(self.resolved.rules)

    def with_rules(self, **rows: tuple[str, ...]) -> Layout:
        """The same mesh with other rows of the table."""
        rules = tuple((self._rules | rows).items())
        return replace(self, resolved=replace(self.resolved, rules=rules))

    def size(self, axes: str | Sequence[str]) -> int:
        """Devices along a mesh axis, or along several taken together."""
        axes = (axes,) if isinstance(axes, str) else axes
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def axes(self, name: str) -> tuple[str, ...]:
        """Mesh axes that cut the logical axis `name`."""
        if name not in self._rules:
            raise ValueError(f"no logical axis {name!r}; known are {', '.join(self._rules)}")
        return self._rules[name]

    def gathered(self, name: str) -> tuple[str, ...]:
        """Mesh axes over which a parameter's dim `name` is gathered before use: those of ZeRO-3."""
        return self.zero_axes(name) if self.config.zero == 3 else ()

    def zero_axes(self, name: str) -> tuple[str, ...]:
        """Mesh axes over which ZeRO cuts a parameter's dim `name`; experts are shared out, whatever
        its stage.
        """
        return tuple(axis for axis in self.axes(name) if axis in ZERO_AXES and name != "expert")

    def param_spec(self, axes: Sequence[str], stack: int = 0) -> P:
        """Spec of a parameter whose last dims are `axes`, after `stack` dims of layers,
        the first of which stages cut.
        """
        return self._spec(axes, stack, cut_by_zero=self.config.zero == 3)

    def accumulator_spec(self, axes: Sequence[str], stack: int = 0) -> P:
        """Spec of its gradient accumulator while micro-batches are added up."""
        return self._spec(axes, stack, cut_by_zero=self.config.zero >= 2)

    def state_spec(self, axes: Sequence[str], stack: int = 0) -> P:
        """Spec of its reduced gradient and of its optimizer moments."""
        return self._spec(axes, stack, cut_by_zero=self.config.zero >= 1)

    def _spec(self, axes: Sequence[str], stack: int, cut_by_zero: bool) -> P:
        def cut(name: str) -> tuple[str, ...]:
            zero = () if cut_by_zero else self.zero_axes(name)
            return tuple(axis for axis in self.axes(name) if axis not in zero)

        entries = [cut(name) for name in axes]
        if stack:
            entries = [cut("layers"), *[()] * (stack - 1), *entries]
        used = [axis for entry in entries for axis in entry]
        if twice := {axis for axis in used if used.count(axis) > 1}:
            raise ValueError(
                f"a parameter with axes {tuple(axes)} would use mesh axis {twice.pop()} twice"
            )
        return P(*[entry or None for entry in entries])

    def batch_spec(self) -> P:
        """Spec of a batch array [microbatch, sequence, token]: each tensor rank sees its group's
        whole rows.
        """
        return P(None, self.axes("batch"), "context")

    def sharding(self, spec: P) -> NamedSharding:
        return NamedSharding(self.mesh, spec)


def make_layout(
    config: LayoutConfig,
    mesh: Mesh,
    dims: Sequence[Dim],
    reduce: Any = jnp.float32,
    branches: str | None = None,
) -> Layout:
    """Settle the rule table for `dims` on `mesh`. reduce: dtype in which gradients travel.
    branches: see `resolve`. Raises ValueError where they do not fit.
    """
    resolved = resolve(config, dict(mesh.shape), dims, branches)
    sides = tuple((axis, sides) for axis, sides in torus_sides(mesh).items() if len(sides) > 1)
    return Layout(mesh, resolved, config, reduce, sides)


def is_param(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def map_params(fn, tree: Any, *rest: Any, other=None) -> Any:
    """`fn(param, *values)` on every `nnx.Param` of `tree`, in place of its value; `other(leaf)` on
    plain leaves.

    The result keeps the Params, so it has the tree structure of `tree`: specs, shardings and masks
    made this way line up with the arrays they describe.
    """

    def one(leaf, *values):
        if is_param(leaf):
            return leaf.replace(fn(leaf, *(value.get_value() for value in values)))
        return other(leaf) if other else leaf

    return jax.tree.map(one, tree, *rest, is_leaf=is_param)


def spec_axes(spec: P) -> tuple[str, ...]:
    """Mesh axes that a spec names, in its order."""
    return tuple(axis for entry in spec for axis in entry_axes(entry))


def entry_axes(entry: Any) -> tuple[str, ...]:
    """Mesh axes of one entry of a spec: None, a name or a tuple of names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def specs(tree: Any, spec_of) -> Any:
    """`spec_of(axes, stack)` for every Param of `tree`; plain leaves (counters) are replicated."""
    return map_params(
        lambda param: spec_of(param.axes, param.get_value().ndim - len(param.axes)),
        tree,
        other=lambda _: P(),
    )
