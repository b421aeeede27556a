"""The layers of a model as data: which kind each is, and what repeats. No JAX here.

A layer is a mixer, which lets tokens see one another, and what follows it, an MLP or experts.
Layers of one kind have parameters of one shape, stacked in the order of the model, whatever else
differs between them: a window or RoPE is a setting, and no parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from .config import LayerConfig, ModelConfig, RopeScalingConfig

T = TypeVar("T")


class Rope(NamedTuple):
    """How a layer turns queries and keys by their positions."""

    theta: float
    scaling: RopeScalingConfig


class Layer(NamedTuple):
    """One layer: the kinds of its two halves, and their settings."""

    mixer: str
    ffn: str
    window: int | None = None
    """tokens a query sees, itself included; None: all before it"""
    rope: Rope | None = None
    """None: positions are not told"""

    @property
    def kinds(self) -> tuple[str, str]:
        return self.mixer, self.ffn


class Slot(NamedTuple):
    """A place in each chunk of layers. A pipeline's stages run one program, so a place that holds
    different layers in different chunks knows all of them.
    """

    options: tuple[Layer, ...]
    choice: tuple[int, ...]
    """which of the options each chunk has, by its depth in the model"""

    def has(self, kind: str) -> bool:
        return any(kind in layer.kinds for layer in self.options)


def layers(config: ModelConfig) -> tuple[Layer, ...]:
    """The model's layers, from the embedding to the head."""
    if config.segments is not None:
        written = [
            layer
            for segment in config.segments
            for _ in range(segment.repeats)
            for layer in segment.layers
        ]
    else:
        windows = config.window_pattern or [config.window]
        ropes = config.rope_pattern or [True]
        written = [
            LayerConfig(
                ffn="swiglu" if number < config.dense_layers else config.usual_ffn,
                window=windows[number % len(windows)],
                rope=ropes[number % len(ropes)],
            )
            for number in range(config.layers)
        ]
    return tuple(_layer(one, config) for one in written)


def _layer(written: LayerConfig, config: ModelConfig) -> Layer:
    rope = None
    if written.rope:
        rope = Rope(written.rope_theta or config.rope_theta, config.rope_scaling)
        if written.window is not None and config.local_rope_theta is not None:
            rope = Rope(config.local_rope_theta, RopeScalingConfig())
    mixer, ffn = written.mixer or config.mixer, written.ffn or config.usual_ffn
    return Layer(mixer, ffn, written.window, rope)


def kinds_of(layers: Sequence[Layer]) -> list[str]:
    """Every kind that occurs, in the order in which they do."""
    return list(dict.fromkeys(kind for layer in layers for kind in layer.kinds))


def kinds_of_slots(slots: Sequence[Slot]) -> list[str]:
    return kinds_of([layer for slot in slots for layer in slot.options])


def numbers_of(layers: Sequence[Layer], kind: str) -> list[int]:
    """Which layers have this kind: those whose parameters its stack holds, one behind the other."""
    return [number for number, layer in enumerate(layers) if kind in layer.kinds]


def held(config: ModelConfig) -> dict[str, list[int]]:
    """Kind -> numbers of the layers that have it: the order of the model, and of checkpoints."""
    every = layers(config)
    return {kind: numbers_of(every, kind) for kind in kinds_of(every)}


def held_by_stages(config: ModelConfig, depths: Sequence[int]) -> dict[str, list[int]]:
    """The same in the order in which a pipeline's stages hold them, chunk after chunk. depths: of
    all chunks in that order. The number of layers stands for padding.
    """
    every = layers(config)
    return {
        kind: [
            number for depth in depths for number in chunk_numbers(every, kind, len(depths), depth)
        ]
        for kind in kinds_of(every)
    }


def slots(layers: Sequence[Layer], depths: int = 1) -> tuple[Slot, ...]:
    """The places of a chunk, where the layers are spread evenly over `depths` chunks; a chunk that
    has one fewer than others has padding in its last place, which counts as what others have there.
    """
    count = len(layers)
    chunks = [layers[count * d // depths : count * (d + 1) // depths] for d in range(depths)]
    found = []
    for place in range(-(-count // depths)):
        here = [chunk[place] if place < len(chunk) else None for chunk in chunks]
        options = tuple(dict.fromkeys(layer for layer in here if layer is not None))
        choice = tuple(0 if layer is None else options.index(layer) for layer in here)
        found.append(Slot(options, choice))
    return tuple(found)


def chunk_numbers(layers: Sequence[Layer], kind: str, depths: int, depth: int) -> list[int]:
    """Numbers of the layers whose parameters of this kind the chunk at `depth` holds, one for each
    place that has the kind in any chunk; the number of layers stands for padding.
    """
    count, places = len(layers), slots(layers, depths)
    first, end = count * depth // depths, count * (depth + 1) // depths
    numbers = range(first, first + len(places))
    return [
        number if number < end and kind in layers[number].kinds else count
        for number, place in zip(numbers, places, strict=True)
        if place.has(kind)
    ]


class Segment(NamedTuple):
    """`repeats` times the same period, from the item `first` on."""

    first: int
    repeats: int
    period: int


def segments(items: Sequence[T]) -> list[Segment]:
    """The items cut into runs that repeat, with as few items as possible in all periods together,
    and then as few runs, the longest first: what a scan over repeats, with a loop over a period
    inside, has to hold.
    """
    count = len(items)
    cheapest: list[tuple[int, int, int, Segment | None]] = [(0, 0, 0, None)] * (count + 1)
    for first in range(count - 1, -1, -1):
        best: tuple[int, int, int, Segment | None] | None = None
        for period in range(1, count - first + 1):
            if best is not None and period > best[0]:
                break
            repeats = 1
            while (
                items[first : first + period]
                == items[first + repeats * period : first + (repeats + 1) * period]
            ):
                repeats += 1
            for times in range(repeats, 0, -1):
                rest = cheapest[first + times * period]
                segment = Segment(first, times, period)
                cost = period + rest[0], 1 + rest[1], -times * period, segment
                if best is None or cost[:3] < best[:3]:
                    best = cost
        assert best is not None
        cheapest[first] = best
    found, at = [], 0
    while at < count:
        segment = cheapest[at][3]
        assert segment is not None
        found.append(segment)
        at += segment.repeats * segment.period
    return found
