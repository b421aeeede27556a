"""The loss scale as a state machine, beside a few lines of Python that say what it must do."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.trainer.config import PrecisionConfig
from meshwright.trainer.optim.precision import PRESETS, first_scale, next_scale


@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_only_f16_is_scaled(compute):
    assert first_scale(PrecisionConfig(compute=compute)) is None
    with pytest.raises(ValueError, match=f"first_scale=8.0 is not read by .*compute={compute}"):
        PrecisionConfig(compute=compute, first_scale=8.0)


@pytest.mark.parametrize(("preset", "scale"), [("torch", 2.0**16), ("megatron", 2.0**32)])
def test_the_first_scale(preset, scale):
    assert first_scale(PrecisionConfig(compute="f16", loss_scale=preset)).scale == scale
    given_scale = PrecisionConfig(compute="f16", loss_scale=preset, first_scale=8.0)
    assert first_scale(given_scale).scale == 8.0


@given(
    st.sampled_from(["torch", "megatron"]),
    st.lists(st.tuples(st.booleans(), st.sampled_from([1, 2, 999, 1000, 1999, 2000])), max_size=12),
)
def test_it_halves_at_overflows_and_doubles_after_a_window(preset, history):
    config = PrecisionConfig(compute="f16", loss_scale=preset, first_scale=4.0)
    rule = PRESETS[preset]
    state, scale, clean, left = first_scale(config), 4.0, 0, rule.hysteresis
    for finite, times in history:
        # `times` attempts alike; of clean ones all but the last only count
        if finite and clean + times < rule.window:
            state = state._replace(clean=state.clean + times - 1)
            clean += times - 1
        state = next_scale(state, jnp.asarray(finite), config)
        if finite:
            clean += 1
            if clean >= rule.window:
                scale, clean, left = scale * 2, 0, rule.hysteresis
        else:
            clean, left = 0, max(left - 1, 0)
            scale = max(scale / 2, 1.0) if left == 0 else scale
        assert (float(state.scale), int(state.clean), int(state.left)) == (scale, clean, left)
