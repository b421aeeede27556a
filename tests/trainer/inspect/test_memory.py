"""The memory table: bytes by name and FLOPs against formulas, temporary bytes of compiled steps."""

from __future__ import annotations

from typing import get_args

import jax
import pytest

from meshwright.models.config import ROUTE, Saved
from meshwright.sharding.grouped import block_sizes
from meshwright.trainer.config import Config
from meshwright.trainer.config.load import override
from meshwright.trainer.inspect.memory import UNNAMED, block_costs, memory_table, temporary_bytes
from meshwright.trainer.state import lay_out

ROWS, TOKENS, D, HEADS, KV, SIZE, FF, LAYERS = 4, 16, 16, 4, 2, 4, 24, 2
"""Of the session's small config on data=2 · fsdp=2 · tensor=2: rows, heads, hidden of a device are
a quarter, a half and a half."""

STREAM = ROWS * TOKENS * D * 4 // 2  # bytes of an activation that tensor cuts
BYTES = {
    "block.input": STREAM,
    "attention.norm": STREAM,
    "attention.qkv": STREAM + 2 * STREAM * KV // HEADS,
    "attention.context": STREAM,
    "attention.logsumexp": STREAM // SIZE,
    "attention.out": STREAM,
    "mlp.norm": STREAM,
    "mlp.gate_up": 2 * STREAM * FF // D,
    "mlp.hidden": STREAM * FF // D,
}
CORE = 2 * 2 * ROWS * TOKENS * TOKENS * (HEADS // 2) * SIZE
LINEAR = 2 * ROWS * TOKENS * D * (2 * HEADS * SIZE + 2 * KV * SIZE + 2 * FF) // 2


def cost(config: Config, *overrides: str):
    config = override(config, *overrides)
    return block_costs(config, lay_out(config))


@pytest.fixture(scope="module")
def plain(small_config):
    return cost(small_config)


@pytest.mark.parametrize(
    ("overrides", "saved", "again"),
    [
        (("remat.policy=full",), ["block.input"], CORE + LINEAR),
        (
            ("remat.policy=selective",),
            set(BYTES) - {"attention.context", "attention.logsumexp"},
            CORE,
        ),
        (("remat.policy=offload",), set(BYTES), 0),
        (
            ("remat.policy=selective", "remat.names=[attention.qkv]", "train.dropout=0.1"),
            ["block.input", "attention.qkv"],
            CORE + LINEAR - 2 * ROWS * TOKENS * D * (HEADS + 2 * KV) * SIZE // 2,
        ),
    ],
)
def test_bytes_by_name_and_flops_are_the_formulas(small_config, plain, overrides, saved, again):
    found = cost(small_config, *overrides)
    assert found.saved == {name: LAYERS * BYTES[name] for name in saved}
    assert found.on_host == (found.saved.total() if "remat.policy=offload" in overrides else 0)
    assert found.flops - plain.flops == LAYERS * again


def test_experts_count_by_the_rows_that_they_have_room_for(small_config):
    """A token's two choices, of experts half as wide as the MLP, and one small block."""
    experts = "model.moe.experts=4", "model.moe.d_ff=12"
    rows = 2 * ROWS * TOKENS + block_sizes(2 * ROWS * TOKENS, 4)[-1]
    selective = cost(small_config, *experts, "remat.policy=selective")
    own = {
        "mlp.gate_up": 2 * rows * 6 * 4,
        "mlp.hidden": rows * 6 * 4,
        ROUTE: ROWS * TOKENS // 2 * 2 * 4,
    }
    expected = {name: LAYERS * size for name, size in (BYTES | own).items()}
    del expected["attention.context"], expected["attention.logsumexp"]
    assert selective.saved == expected
    again = (
        cost(small_config, *experts, "remat.policy=full").flops - cost(small_config, *experts).flops
    ) / LAYERS
    router = 2 * ROWS * TOKENS // 2 * D * 4
    rest = CORE + LINEAR - 2 * ROWS * TOKENS * D * 2 * FF // 2 + router
    assert again == rest + 2 * rows * D * 2 * 12 // 2


def test_dense_layers_before_experts_count_too(small_config):
    experts = "model.moe.experts=4", "model.dense_layers=1", "remat.policy=full"
    saved = cost(small_config, *experts).saved
    route = ROWS * TOKENS // 2 * 2 * 4  # two experts of each token of a device, in one layer
    assert saved == {"block.input": LAYERS * STREAM, ROUTE: route}


def test_every_name_of_the_config_is_one_of_the_model():
    assert set(get_args(Saved)) == {*BYTES, "attention.latent"}


def test_latents_are_saved_by_their_name(small_config):
    """Those of a device's own tokens: ranks 8 and 12, and a shared key of 2 channels."""
    latent = (
        *("model.mixer=mla", "model.kv_heads=null", "model.mla.kv_rank=8", "model.mla.q_rank=12"),
        *("model.mla.nope_dim=4", "model.mla.rope_dim=2", "model.mla.value_dim=6"),
    )
    saved = cost(
        small_config, *latent, "remat.policy=selective", "remat.names=[attention.latent]"
    ).saved
    own = ROWS * TOKENS // 2 * (8 + 12 + 2) * 4
    assert saved == {"block.input": LAYERS * STREAM, "attention.latent": LAYERS * own}
    with pytest.raises(ValueError, match="^remat.names: attention.latent is of no layer with mod"):
        override(small_config, "remat.policy=selective", "remat.names=[attention.latent]")


def test_half_of_the_layers_recomputed_saves_half(small_config, plain):
    full, half = (
        cost(small_config, "remat.policy=full", f"remat.every={every}") for every in (1, 2)
    )
    assert half.saved.total() == (plain.saved.total() + full.saved.total()) / 2
    assert half.flops - plain.flops == (full.flops - plain.flops) / 2
    assert half.saved["mlp.hidden"] == BYTES["mlp.hidden"]


def test_without_a_policy_more_is_saved_than_has_a_name(plain):
    assert plain.saved[UNNAMED] > sum(BYTES.values())


def test_dropout_saves_keys_and_no_masks(small_config, plain):
    dropped = cost(small_config, "train.dropout=0.1")
    assert dropped.saved.total() - plain.saved.total() == LAYERS * 2 * ROWS * 8


def rows(table: str) -> dict[str, list[int]]:
    lines = table.splitlines()[2:]
    return {
        line[:24].strip(): [int(a.replace(",", "")) for a in line[24:].split()] for line in lines
    }


def test_the_table_and_the_temporary_bytes_of_16_layers(small_config, capsys):
    config = override(small_config, "model.layers=16", "remat.policy=full", "remat.every=4")
    table = memory_table(config, jax.devices())
    assert capsys.readouterr() == (
        "",
        "meshwright: compiling the step 4 times, once for each policy, for 8 × cpu\n",
    )
    title, policies, *_ = table.splitlines()
    assert title.startswith("bytes per device of data=2 · fsdp=2 · tensor=2, ")
    assert title.endswith("remat policy=full, every=4")
    assert policies.split() == ["none", "full", "selective", "offload"]
    found = rows(table)
    assert list(found) == [
        *get_args(Saved),
        UNNAMED,
        "saved, per layer",
        "of it on the host",
        "FLOPs again, per layer",
        "temporary, the step",
    ]
    none, quarter, selective, offload = found["saved, per layer"]
    assert quarter == round((3 * none + STREAM) / 4)
    assert found["of it on the host"] == [0, 0, 0, offload]
    none, quarter, selective, _ = found["temporary, the step"]
    full = temporary_bytes(override(config, "remat.every=1"), lay_out(config))
    assert none > quarter > full and none > selective > full
