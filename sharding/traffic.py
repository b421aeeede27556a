"""The bytes that one device sends, by formula: each mechanism has its own beside it, in terms of
what is here.

On a ring of N devices, n the bytes of the full array: all-reduce 2(N-1)/N·n; all-gather,
reduce-scatter and N-1 permutes (N-1)/N·n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .layout import Layout

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
PERMUTE, ALL_TO_ALL = "collective-permute", "all-to-all"


@dataclass(frozen=True)
class Traffic:
    """What one device sends by one kind of collective."""

    what: str
    """the mechanism, in the words of a report"""
    kind: str
    axes: tuple[str, ...]
    """mesh axes of more than one device"""
    sent: float
    """bytes"""


@dataclass(frozen=True)
class LayerRuns:
    """How often one device runs a layer in a step, and on what."""

    rows: int
    """sequences of a device in one micro-batch"""
    seq_len: int
    passes: float
    """times that the layer runs forward, and as often backward"""
    again: float
    """how many of them run forward once more, to recompute what was not saved"""
    saved: frozenset[str]
    """names of what a recomputed layer saves"""
    itemsize: int
    """bytes of an activation's element"""
    apart: bool
    """whether the gradients of weights are computed later than those of inputs"""
    branch: bool = False
    """whether it is one of several layers in a branch: there a recomputation is a branch of its
    own, whose gathers no compiler takes for those of the backward pass
    """

    def tokens(self, layout: Layout) -> int:
        """Tokens of one micro-batch that a tensor group holds."""
        return self.rows * self.seq_len // layout.size("context")


def ring(what: str, kind: str, axes: Sequence[str], n: float, layout: Layout) -> Traffic:
    """What one device sends of n bytes."""
    wide = tuple(axis for axis in layout.mesh.axis_names if axis in axes and layout.size(axis) > 1)
    devices = layout.size(wide)
    factor = 2 if kind == ALL_REDUCE else 1
    return Traffic(what, kind, wide, factor * (devices - 1) / devices * n)


def taken(some: int, every: int) -> str:
    """Name of a `jax.named_scope` around a conditional in a loop of `every` rounds: what its branch
    sends counts in `some` of them.
    """
    return f"taken_{some}_of_{every}_times"
