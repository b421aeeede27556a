"""Muon against Newton-Schulz on each layer's matrix."""

from __future__ import annotations

import numpy as np

from meshwright.trainer.config import OptimizerConfig
from updates import (
    STACKED,
    run_updates,
    stacked_params,
    values,
)


def test_muon_is_newton_schulz_on_each_layer_s_matrix_and_adamw_elsewhere():
    lr, decay, mu = 0.05, 0.3, 0.9
    config = OptimizerConfig(name="muon", weight_decay=decay, momentum=mu)
    start, all_grads, params, _ = run_updates(config, lr, updates=3, start=stacked_params())
    shapes = {"q": (3, 4, 6), "o": (3, 6, 4), "up": (3, 4, 7)}
    for name, shape in shapes.items():
        p = values(start)[name].reshape(shape)
        m = np.zeros_like(p)
        for grads in map(values, all_grads):
            g = grads[name].reshape(shape)
            m = mu * m + g
            ahead = mu * m + g
            step = 0.2 * np.sqrt(max(shape[1:])) * np.stack([newton_schulz(x) for x in ahead])
            p = p - lr * (step + decay * p)
        expected = p.reshape(STACKED[name][1])
        np.testing.assert_allclose(values(params)[name], expected, rtol=5e-6, atol=2e-6)

    rest = {name for name in STACKED if name not in shapes}
    _, _, adamw, _ = run_updates(
        OptimizerConfig(weight_decay=decay), lr, updates=3, start=stacked_params()
    )
    for name in rest:
        np.testing.assert_array_equal(values(params)[name], values(adamw)[name])


def newton_schulz(x: np.ndarray) -> np.ndarray:
    """Five iterations of the quintic from x of unit norm."""
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x
