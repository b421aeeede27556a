"""RoPE: turning keeps lengths and depends on distance alone; its scalings are their formulas."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.models.config import RopeScalingConfig
from meshwright.models.pattern import Rope
from meshwright.models.rope import frequencies, rotate, rotations

SIZE, THETA = 16, 10_000.0
PLAIN = THETA ** (-np.arange(0, SIZE, 2) / SIZE)


def scaled(kind, **settings):
    return np.asarray(
        frequencies(SIZE, THETA, RopeScalingConfig(kind=kind, **settings)), np.float64
    )


def turns(positions, **settings):
    return rotations(positions, Rope(THETA, RopeScalingConfig(**settings)), SIZE)


def test_without_scaling_frequencies_are_the_powers():
    np.testing.assert_allclose(scaled("none"), PLAIN, rtol=1e-6)


def test_linear_divides_every_frequency():
    np.testing.assert_allclose(scaled("linear", factor=4.0), PLAIN / 4, rtol=1e-6)


def test_ntk_keeps_the_first_frequency_and_divides_the_last():
    found = scaled("ntk", factor=4.0)
    np.testing.assert_allclose(found[[0, -1]], PLAIN[[0, -1]] / [1, 4], rtol=1e-5)
    assert (np.diff(found / PLAIN) < 0).all()


def test_llama3_is_linear_in_the_turns_between_its_bounds():
    """Frequencies of the published code, computed one by one."""
    factor, low, high, original = 8.0, 1.0, 4.0, 64
    expected = []
    for frequency in PLAIN:
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            expected.append(frequency)
        elif wavelength > original / low:
            expected.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            expected.append((1 - smooth) * frequency / factor + smooth * frequency)
    found = scaled("llama3", factor=factor, original=original)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert {1.0, 8.0} < set(np.round(PLAIN / found, 4))  # and at least one between


def test_yarn_is_linear_in_the_channel_between_its_bounds():
    """Head of 16, theta 1e4, 4096 tokens: 32 turns at i = 2.61, 1 turn at i = 5.63."""
    found = scaled("yarn", factor=4.0, original=4096)
    kept = (found / PLAIN - 1 / 4) / (3 / 4)
    np.testing.assert_allclose(kept, [1, 1, 1, 3 / 4, 2 / 4, 1 / 4, 0, 0], atol=1e-5)


def test_yarn_raises_scores_by_the_square_of_its_temperature():
    positions = jnp.arange(3)[None]
    yarn = turns(positions, kind="yarn", factor=4.0, original=8)
    x = jnp.ones((1, 3, 1, SIZE))
    temperature = 0.1 * math.log(4) + 1
    np.testing.assert_allclose(jnp.sum(rotate(x, yarn) ** 2, -1), SIZE * temperature**2, rtol=1e-5)


@pytest.mark.parametrize("kind", ["none", "linear", "ntk", "llama3"])
def test_scores_depend_on_the_distance_alone(kind):
    settings = {} if kind == "none" else {"factor": 4.0}
    settings |= {"original": 32} if kind == "llama3" else {}
    x = jnp.linspace(-1, 1, SIZE).reshape(1, 1, 1, SIZE).repeat(2, axis=1)

    def score(first, second):
        turned = rotate(x, turns(jnp.array([[first, second]]), kind=kind, **settings))
        return float(jnp.sum(turned[0, 0] * turned[0, 1]))

    assert score(3, 10) == pytest.approx(score(40, 47), rel=1e-4)
    assert score(3, 10) != pytest.approx(score(3, 12), rel=1e-2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"factor": 2.0}, "factor=2.0 is not read by model.rope_scaling.kind=none"),
        ({"kind": "linear", "original": 8}, "original=8 is not read by .*kind=linear"),
        ({"kind": "yarn", "factor": 2.0}, "original=null: .*kind=yarn needs the tokens"),
        (
            {"kind": "llama3", "factor": 2.0, "original": 8, "low": 4.0},
            "low=4.0 is not below model.rope_scaling.high=4.0",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RopeScalingConfig(**settings)
