"""Patterns: what repeats, what each chunk of a pipeline has, and in which order layers are held."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.models import pattern
from meshwright.models.config import LayerConfig, ModelConfig, MoeConfig, SegmentConfig


def spelled(items, segments):
    return [
        items[segment.first + place]
        for segment in segments
        for _ in range(segment.repeats)
        for place in range(segment.period)
    ]


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=24))
def test_segments_spell_the_layers(items):
    segments = pattern.segments(items)
    assert spelled(items, segments) == items
    assert sum(segment.period for segment in segments) <= len(items)


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ("aaaa", [(0, 4, 1)]),
        ("aaabbbbb", [(0, 3, 1), (3, 5, 1)]),
        ("llgllgllg", [(0, 3, 3)]),
        ("lllllg" * 4 + "ll", [(0, 4, 6), (24, 2, 1)]),
        ("abcd", [(0, 1, 4)]),
    ],
)
def test_the_shortest_periods_are_found(items, expected):
    """Gemma 3's pattern does not divide its layers; DeepSeek-V3's has dense layers first."""
    assert [tuple(segment) for segment in pattern.segments(items)] == expected


@pytest.mark.parametrize("depths", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", [8, 13, 61])
def test_every_layer_is_held_once_and_where_its_chunk_has_it(count, depths):
    config = ModelConfig(layers=count, dense_layers=3, moe=MoeConfig(experts=4))
    held = pattern.held_by_stages(config, range(depths))
    for kind, numbers in pattern.held(config).items():
        assert [number for number in held[kind] if number < count] == numbers
        assert len(held[kind]) % depths == 0  # stages hold equally many
    slots = pattern.slots(pattern.layers(config), depths)
    for depth in range(depths):
        first, end = count * depth // depths, count * (depth + 1) // depths
        chosen = [slot.options[slot.choice[depth]] for slot in slots][: end - first]
        assert chosen == list(pattern.layers(config)[first:end])


def test_settings_of_layers_follow_their_patterns():
    config = ModelConfig(
        layers=5, window_pattern=[8, None], rope_pattern=[True, True, False], local_rope_theta=5.0
    )
    layers = pattern.layers(config)
    assert [layer.window for layer in layers] == [8, None, 8, None, 8]
    thetas = [None if layer.rope is None else layer.rope.theta for layer in layers]
    assert thetas == [5.0, 10_000.0, None, 10_000.0, 5.0]


def test_segments_of_the_config_are_layers_one_by_one():
    segments = [
        SegmentConfig(repeats=2, layers=[LayerConfig(window=4, ffn="swiglu"), LayerConfig()]),
        SegmentConfig(layers=[LayerConfig(rope=False)]),
    ]
    config = ModelConfig(layers=5, segments=segments, moe=MoeConfig(experts=2))
    layers = pattern.layers(config)
    assert [layer.ffn for layer in layers] == ["swiglu", "moe", "swiglu", "moe", "moe"]
    assert [layer.window for layer in layers] == [4, None, 4, None, None]
    assert [layer.rope is None for layer in layers] == [False] * 4 + [True]
