"""The start-up summary against the arrays themselves."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from meshwright.trainer.config import Config
from meshwright.trainer.config.load import override
from meshwright.trainer.log.summary import device_bytes, summarize
from meshwright.trainer.state import abstract_state, lay_out, state_shardings


def rows(config: Config, devices: int = 8) -> dict[str, str]:
    layout = lay_out(config, jax.devices()[:devices])
    lines = summarize(config, layout, abstract_state(config))
    return {line[:12].strip(): line[12:] for line in lines}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bytes_are_those_of_the_shards_on_every_device(small_config, zero):
    """Case C20. Placed, not computed: what is counted is what JAX puts on each device."""
    config = override(small_config, f"layout.zero={zero}")
    layout, state = lay_out(config), abstract_state(config)
    shardings = state_shardings(state, layout)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state)
    placed = jax.device_put(zeros, shardings)
    held = device_bytes(state.params, shardings.params), device_bytes(state.opt, shardings.opt)
    for device in layout.mesh.devices.flat:
        for tree, expected in zip((placed.params, placed.opt), held, strict=True):
            shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
            assert expected == sum(s.data.nbytes for s in shards if s.device == device)
    text = rows(config)["at rest"]
    assert text == f"{held[0]:,} + {held[1]:,} bytes per device, parameters + optimizer state"


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted_without_padding(small_config, tied):
    """Vocabulary 257 is stored as 384 rows."""
    config = override(small_config, f"model.tie_embeddings={str(tied).lower()}")
    tables, d, ff, head, layers = (1 if tied else 2), 16, 24, 4, 2
    attention = 2 * d * 4 * head + 2 * d * 2 * head
    parameters = tables * 257 * d + layers * (attention + 3 * d * ff + 2 * d) + d
    padding = tables * (384 - 257) * d
    assert rows(config)["parameters"] == f"{parameters:,}, and {padding:,} that pad the vocabulary"


def test_the_decayed_and_the_replicated_set(small_config):
    """Case C13."""
    norms = "optimizer.groups.norm.weight_decay=0.5"
    found = rows(override(small_config, "optimizer.weight_decay=0", norms))
    assert found["decayed"] == "layers.attention.norm, layers.swiglu.norm, norm"
    assert found["replicated"] == "layers.attention.norm, layers.swiglu.norm, norm"
    found = rows(override(small_config, "optimizer.weight_decay=0"))
    assert found["decayed"] == "nothing"


def test_dtypes_of_all_leaves_of_the_state(small_config):
    """Case C11. 12 parameters and as many of each moment; step, skipped and the count of Adam;
    position.
    """
    assert rows(small_config)["dtypes"] == "float32: 36 leaves, int32: 3 leaves, uint32: 1 leaf"
    found = rows(override(small_config, "optimizer.moments=bf16", "optimizer.ema=0.9"))
    kinds = "float32: 24 leaves, bfloat16: 24 leaves, int32: 3 leaves, uint32: 1 leaf"
    assert found["dtypes"] == kinds


def test_parameters_with_a_rate_of_their_own_are_listed(small_config):
    assert "rate times" not in rows(small_config)
    found = rows(
        override(small_config, "optimizer.groups.norm.lr=2", "optimizer.groups.embedding.lr=0.1")
    )
    assert (
        found["rate times"]
        == "embed 0.1, layers.attention.norm 2, layers.swiglu.norm 2, norm 2, unembed 0.1"
    )


def test_without_zero_and_tensor_everything_is_replicated(small_config):
    config = override(small_config, "mesh.data=8", "mesh.fsdp=1", "mesh.tensor=1")
    replicated = rows(config)["replicated"].split(", ")
    assert {"embed", "unembed", "layers.attention.q", "layers.swiglu.down", "norm"} <= set(
        replicated
    )


def test_mesh_and_tokens(small_config):
    config = override(small_config, "train.microbatches=2", "layout.zero=2")
    kind = jax.devices()[0].device_kind
    found = rows(config)
    assert found["mesh"] == f"data=2 · fsdp=2 · tensor=2, zero 2, on 8 × {kind}"
    assert found["per update"] == "16 rows of 16 tokens, 256 in all, over 2 micro-batch(es)"
    one = override(
        config, *("device.cpu_devices=null", "mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1")
    )
    assert rows(one, devices=1)["mesh"].startswith("one device, ")


def test_what_the_mesh_could_not_cut_is_noted(small_config):
    config = override(small_config, "mesh.data=1", "mesh.tensor=4")
    assert "kv heads repeated to 4" in rows(config)["note"]
