"""SwiGLU MLP (arXiv 2002.05202): down(silu(gate(x)) · up(x)), hidden width F cut over `tensor`."""

from __future__ import annotations

from collections.abc import Iterator

import jax
from flax import nnx

from ...sharding.layout import Layout
from ...sharding.linear import entrance_sent, exit_sent, linear
from ...sharding.traffic import LayerRuns, Traffic
from .. import init
from ..config import ModelConfig
from ..inputs import LayerInputs
from ..pattern import Layer
from .sublayer import Kind, Sublayer


class Mlp(nnx.Module):
    """gate, up [D, F], down [F, D] and their biases."""

    def __init__(self, config: ModelConfig, key: jax.Array, width: int, name: str):
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


class Swiglu(Sublayer, Mlp):
    """An MLP with its norms."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        Sublayer.__init__(self, config)
        Mlp.__init__(self, config, key, config.d_ff, "mlp")


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


def swiglu_sent(
    config: ModelConfig, runs: LayerRuns, layout: Layout, read_again: bool
) -> Iterator[Traffic]:
    """One entrance and one exit. read_again: whether the backward pass needs what left, as a norm
    behind it does; then a recomputation makes the exit again.
    """
    yield from entrance_sent(config.d_model, runs, layout)
    yield from exit_sent(config.d_model, runs, layout, again=runs.again if read_again else 0)


def _apply(p: Swiglu, x: jax.Array, layer: Layer, inputs: LayerInputs) -> tuple[jax.Array, None]:
    return swiglu(p, x, inputs.layout), None


def _flops(config: ModelConfig, layer: Layer, tokens: int) -> float:
    return 2.0 * tokens * 3 * config.d_model * config.d_ff


def _sent(config: ModelConfig, layer: Layer, runs: LayerRuns, layout: Layout) -> Iterator[Traffic]:
    return swiglu_sent(config, runs, layout, read_again=config.norm != "pre")


SWIGLU = Kind(scope="mlp", params=Swiglu, apply=_apply, flops=_flops, sent=_sent)
