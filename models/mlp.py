"""SwiGLU MLP (arXiv 2002.05202): down(silu(gate(x)) · up(x)), hidden width cut over `tensor`."""

from __future__ import annotations

import jax
from flax import nnx

from ..sharding.layout import Layout
from ..sharding.linear import linear
from . import init
from .config import ModelConfig


class Mlp(nnx.Module):
    """gate, up [D, F], down [F, D] and their biases."""

    def __init__(self, config: ModelConfig, key: jax.Array, width: int, name: str = "mlp"):
        d, f = config.d_model, width
        self.gate = init.matrix(key, config, f"{name}.gate", ("embed", "mlp"), (d, f), fan_in=d)
        self.up = init.matrix(key, config, f"{name}.up", ("embed", "mlp"), (d, f), fan_in=d)
        self.down = init.matrix(
            key, config, f"{name}.down", ("mlp", "embed"), (f, d), fan_in=f, residual=True
        )
        biased = config.bias == "all"
        self.gate_bias = init.bias(("mlp",), (f,)) if biased else None
        self.up_bias = init.bias(("mlp",), (f,)) if biased else None
        self.down_bias = init.bias(("channel",), (d,)) if biased else None


def swiglu(p: Mlp, x: jax.Array, layout: Layout) -> jax.Array:
    """x[B, S_{context,tensor}, D] -> the same."""
    gate, up = linear(
        x,
        (p.gate, p.up),
        layout,
        biases=(p.gate_bias, p.up_bias),
        enter="tensor",
        input_name="mlp.norm",
        name="mlp.gate_up",
    )
    return linear(
        jax.nn.silu(gate) * up,
        p.down,
        layout,
        biases=(p.down_bias,),
        leave="tensor",
        input_name="mlp.hidden",
    )
