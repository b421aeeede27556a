"""For tests of checkpoints: saving a state, the one that is expected back, comparing their bits."""

from __future__ import annotations

import math
from contextlib import contextmanager

import jax
import numpy as np

from meshwright.trainer.checkpoint.save import open_checkpoints
from meshwright.trainer.config.load import override
from meshwright.trainer.data.tokenizer import ByteTokenizer
from meshwright.trainer.state import abstract_state, lay_out, state_shardings


@contextmanager
def checkpoints_in(path, config, *overrides: str, losses=None, said=None):
    config = override(config, *overrides)
    say = (lambda line: None) if said is None else said.append
    losses = {} if losses is None else losses
    layout, text = lay_out(config), ByteTokenizer.text
    with open_checkpoints(path, config, layout, text, losses, say) as checkpoints:
        yield checkpoints


def target_on(config, *overrides: str):
    """The abstract state with the shardings of another layout, and that layout's device count."""
    config = override(config, "device.cpu_devices=null", *overrides)
    devices = math.prod(config.mesh.sizes().values())
    layout, state = lay_out(config, jax.devices()[:devices]), abstract_state(config)
    shardings = state_shardings(state, layout)
    target = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        shardings,
    )
    return target, devices


def assert_bitwise(restored, state):
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert ours.dtype == theirs.dtype
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
