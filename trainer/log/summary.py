"""The start-up summary: what is trained, what a device holds, in which dtypes, what decays, what
is replicated.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax

from ...sharding.layout import Layout
from ..config import Config
from ..optim.optimizer import decayed, rate_factors
from ..state import State, named_leaves, state_shardings
from .tables import in_columns


def summarize(config: Config, layout: Layout, state: State) -> list[str]:
    """Lines for people; `state` may be abstract. Bytes are those at rest, between steps."""
    train, shardings = config.train, state_shardings(state, layout)
    sizes = [f"{axis}={size}" for axis, size in layout.mesh.shape.items() if size > 1]
    mesh = f"{' · '.join(sizes) or 'one device'}, zero {config.layout.zero}"
    kinds = ", ".join(sorted({device.device_kind for device in layout.mesh.devices.flat}))
    tables = 1 if config.model.tie_embeddings else 2
    padded_rows = config.model.padded_vocab - config.model.vocab_size
    padding = tables * padded_rows * config.model.d_model
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params)) - padding
    held = (
        device_bytes(state.params, shardings.params),
        device_bytes((state.opt, state.average), (shardings.opt, shardings.average)),
    )
    dtypes = Counter(str(leaf.dtype) for leaf in jax.tree.leaves(state))
    decay = named_leaves(decayed(state.params, config.optimizer))
    factors = named_leaves(rate_factors(state.params, config.optimizer))
    whole = named_leaves(jax.tree.map(lambda s: s.is_fully_replicated, shardings.params))
    rows = {
        "mesh": f"{mesh}, on {layout.mesh.size} × {kinds}",
        "parameters": f"{parameters:,}, and {padding:,} that pad the vocabulary",
        "at rest": f"{held[0]:,} + {held[1]:,} bytes per device, parameters + optimizer state",
        "dtypes": ", ".join(
            f"{dtype}: {count} {'leaf' if count == 1 else 'leaves'}"
            for dtype, count in dtypes.most_common()
        ),
        "per update": f"{train.batch_size} rows of {train.seq_len} tokens, "
        f"{train.batch_size * train.seq_len:,} in all, over {train.microbatches} micro-batch(es)",
        "decayed": ", ".join(name for name, flag in decay.items() if flag) or "nothing",
    }
    if changed := [f"{name} {factor:g}" for name, factor in factors.items() if factor != 1]:
        rows["rate times"] = ", ".join(changed)
    if layout.mesh.size > 1:
        rows["replicated"] = ", ".join(name for name, flag in whole.items() if flag) or "nothing"
    return in_columns([*rows.items(), *(("note", note) for note in layout.resolved.notes)])


def device_bytes(tree: Any, shardings: Any) -> int:
    """Bytes of the leaves that one device holds."""
    return sum(
        math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
    )
