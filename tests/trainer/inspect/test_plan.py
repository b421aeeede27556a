"""Contracts: what each layout sends and holds, read off compiled steps, is what the tables say."""

from __future__ import annotations

import functools
import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import jax
import pytest

from meshwright.sharding import layout as layouts
from meshwright.trainer.cli import main
from meshwright.trainer.config.load import override, to_yaml
from meshwright.trainer.inspect import plan as plans
from meshwright.trainer.inspect.hlo import Collective, Program
from meshwright.trainer.inspect.memory import memory_table
from meshwright.trainer.inspect.plan import describe_plan, make_plan
from runs import SMALL, first_devices, make_config

BLOCKS, TABLES, NORMS = 2 * (16 * 32 + 16 * 16 + 3 * 16 * 24), 2 * 384 * 16, 5 * 16
"""Elements of SMALL: q and o, k and v, gate, up and down of two layers; vocabulary; norm scales."""

PSI = BLOCKS + TABLES
STREAM = 16 * 16 * 16 * 4
"""Bytes of the whole batch's residual stream."""

TOKENS = 16 * 16
PLACES = 2 * 4 * TOKENS
"""Of each token its position and document."""


def all_reduce(n, size):
    return 2 * (size - 1) / size * n


def one_way(n, size):
    """All-gather, reduce-scatter."""
    return (size - 1) / size * n


CONTRACTS = {
    # gradients once, the number of targets, the loss, the norm
    "mesh.data=8 train.microbatches=2": {
        "data all-reduce": all_reduce(4 * (PSI + NORMS) + 12, 8),
    },
    "mesh.fsdp=8 layout.zero=0": {
        "fsdp all-reduce": all_reduce(4 * (PSI + NORMS) + 12, 8),
    },
    "mesh.fsdp=8 layout.zero=1 train.microbatches=2": {
        "fsdp all-reduce": all_reduce(4 * NORMS + 12, 8),
        "fsdp reduce-scatter": one_way(4 * PSI, 8),
        "fsdp all-gather": one_way(4 * PSI, 8),
    },
    "mesh.fsdp=8 layout.zero=2 train.microbatches=2": {
        "fsdp all-reduce": all_reduce(4 * NORMS + 12, 8),
        "fsdp reduce-scatter": one_way(2 * 4 * PSI, 8),
        "fsdp all-gather": one_way(4 * PSI, 8),
    },
    # blocks forward and backward; XLA gathers the tables once for all micro-batches
    "mesh.fsdp=8 train.microbatches=2": {
        "fsdp all-reduce": all_reduce(4 * NORMS + 12, 8),
        "fsdp reduce-scatter": one_way(2 * 4 * PSI, 8),
        "fsdp all-gather": one_way(4 * (2 * 2 * BLOCKS + TABLES), 8),
    },
    "mesh.fsdp=8 remat.policy=full": {
        "fsdp all-reduce": all_reduce(4 * NORMS + 12, 8),
        "fsdp reduce-scatter": one_way(4 * PSI, 8),
        "fsdp all-gather": one_way(4 * (2 * BLOCKS + TABLES), 8),
    },
    # the slow axis moves a quarter
    "mesh.data=2 mesh.fsdp=4": {
        "data all-reduce": all_reduce(4 * PSI // 4, 2),
        "data fsdp all-reduce": all_reduce(4 * NORMS + 12, 8),
        "fsdp reduce-scatter": one_way(4 * PSI, 4),
        "fsdp all-gather": one_way(4 * (2 * BLOCKS + TABLES), 4),
    },
    # two exits a layer and the embedding's, forward and backward; three numbers a token; the
    # gradients of whole scales are shares without sequence parallelism too
    "mesh.tensor=2 layout.sequence_parallel=false": {
        "tensor all-reduce": all_reduce(10 * STREAM + 12 * TOKENS + 4 * NORMS + 8, 2),
    },
    "mesh.tensor=2": {
        "tensor all-gather": one_way((2 * 6 + 2) * STREAM, 2),
        "tensor reduce-scatter": one_way((2 * 4 + 2) * STREAM, 2),
        "tensor all-reduce": all_reduce(12 * TOKENS + 4 * NORMS + 8, 2),
    },
    # the vocabulary's two ends keep theirs
    "mesh.tensor=4 model.kv_heads=4 layout.overlap=ring": {
        "tensor all-gather": one_way(2 * STREAM, 4),
        "tensor reduce-scatter": one_way(2 * STREAM, 4),
        "tensor collective-permute": 3 * (2 * 10 * STREAM // 4),
        "tensor all-reduce": all_reduce(12 * TOKENS + 4 * NORMS + 8, 4),
    },
    # half as many kv heads as heads, so k and v together are a stream; in every layer three hops
    # forward and three backward, and four of their gradients
    "mesh.context=4": {
        "context all-gather": one_way(PLACES, 4),
        "context collective-permute": 2 * (3 + 3 + 4) * STREAM // 4,
        "context all-reduce": all_reduce(4 * (PSI + NORMS) + 12, 4),
    },
    "mesh.context=4 layout.context=zigzag": {
        "context all-gather": one_way(PLACES, 4),
        "context collective-permute": 2 * (3 + 3 + 4) * STREAM // 4,
        "context all-reduce": all_reduce(4 * (PSI + NORMS) + 12, 4),
    },
    # saved by name, k and v are not sent again
    "mesh.context=4 remat.policy=selective remat.names=[attention.context,attention.logsumexp]": {
        "context all-gather": one_way(PLACES, 4),
        "context collective-permute": 2 * (3 + 3 + 4) * STREAM // 4,
        "context all-reduce": all_reduce(4 * (PSI + NORMS) + 12, 4),
    },
    # q, k, v, o and their gradients; two kv heads are repeated to four
    "mesh.context=2 layout.context=ulysses": {
        "context all-gather": one_way(PLACES, 2),
        "context all-to-all": 2 * 2 * one_way(3 * STREAM // 2, 2),
        "context all-reduce": all_reduce(4 * (PSI + NORMS) + 12, 2),
    },
    "mesh.context=4 layout.context=ulysses": {
        "context all-gather": one_way(PLACES, 4),
        "context all-to-all": 2 * 2 * one_way(4 * STREAM // 4, 4),
        "context all-reduce": all_reduce(4 * (PSI + NORMS) + 12, 4),
    },
    "mesh.context=4 layout.context=all_gather": {
        "context all-gather": one_way(PLACES + 2 * 2 * STREAM, 4),
        "context reduce-scatter": one_way(2 * STREAM, 4),
        "context all-reduce": all_reduce(4 * (PSI + NORMS) + 12, 4),
    },
    # two groups of two: one hop of what a device holds for half of the heads and twice the tokens
    "mesh.context=4 layout.context=usp train.microbatches=2": {
        "context all-gather": one_way(PLACES, 4),
        "context all-to-all": 2 * 2 * one_way(3 * STREAM // 4, 2),
        "context collective-permute": 2 * (1 + 1 + 2) * STREAM // 4,
        "context all-reduce": all_reduce(4 * (PSI + NORMS) + 12, 4),
    },
}


@functools.cache
def plan_of(*overrides: str):
    config = make_config(*SMALL, "optimizer.name=adamw", *overrides)
    return config, make_plan(config, first_devices(config))


@pytest.mark.parametrize("layout", CONTRACTS)
def test_a_layout_sends_what_its_contract_says(layout):
    _, plan = plan_of(*layout.split())
    found = {f"{' '.join(row.axes)} {row.kind}": row.sent for row in plan.moved}
    assert found == CONTRACTS[layout]
    assert (plan.unexplained, plan.unknown) == (0, ())
    assert all(row.exposed == row.sent for row in plan.moved)  # CPU waits for each
    for row in plan.moved:  # only the tables of further micro-batches are cheaper than the formula
        saved = one_way(4 * TABLES, 8) if "mesh.fsdp=8 train.micro" in layout else 0
        assert row.formula - row.sent == (saved if row.kind == "all-gather" else 0)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_torus_scatters_the_same_bytes_side_by_side(stage, monkeypatch):
    config, whole = plan_of("mesh.fsdp=8", f"layout.zero={stage}")
    monkeypatch.setattr(layouts, "torus_sides", lambda mesh: {"fsdp": (2, 4)})
    torus = make_plan(config, first_devices(config))
    assert (torus.unexplained, torus.unknown) == (0, ())
    (before,), (after,) = (
        [row for row in plan.moved if row.kind == "reduce-scatter"] for plan in (whole, torus)
    )
    assert (after.sent, after.times) == (before.sent, 2 * before.times)


@pytest.mark.parametrize("layout", ["mesh.fsdp=4 mesh.tensor=2", "mesh.fsdp=8 layout.zero=1"])
@pytest.mark.parametrize("rule", ["muon", "adafactor optimizer.min_dim_size_to_factor=8", "lamb"])
def test_an_update_rule_sends_what_it_says(rule, layout):
    _, plan = plan_of(*layout.split(), *f"optimizer.name={rule}".split())
    assert (plan.unexplained, plan.unknown) == (0, ())
    assert [row.why for row in plan.moved if row.sent != row.formula] == []
    assert any({"whole matrices", "update rule"} & set(row.why) for row in plan.moved)


def test_a_pipeline_sends_a_neighbour_one_activation_and_one_gradient_a_tick():
    """And what all stages share of the vocabulary is reduced over them, once for each micro-batch:
    the program does so in a branch that it takes in some ticks of its loop."""
    config = make_config(
        *SMALL, "model.layers=4", "mesh.pipe=4", "train.microbatches=8", "layout.schedule=gpipe"
    )
    moved = make_plan(config, jax.devices()[:4]).moved
    permutes, reduces = (
        next(row for row in moved if row.axes == ("pipe",) and row.kind == kind)
        for kind in ("collective-permute", "all-reduce")
    )
    ticks, stream = 8 + 4 - 1, 2 * 16 * 16 * 4
    assert permutes.sent == permutes.formula == 2 * ticks * stream
    assert 4 * 8 * 1.5 * stream < reduces.formula == reduces.sent


def test_stages_that_branch_send_what_they_have_ops_for():
    """Nothing for idle ticks, as masked stages do; each exit's gradients are gathered again in W.
    Only the neighbour gets something in every tick: two loops have an F, two have a B."""
    pipeline = "model.layers=4", "mesh.pipe=2", "train.microbatches=4", "layout.schedule=zb_h1"
    _, plan = plan_of(*pipeline, "mesh.fsdp=2", "mesh.tensor=2")
    assert (plan.unexplained, plan.unknown) == (0, ())
    assert all(row.sent == row.formula for row in plan.moved)
    found = {f"{' '.join(row.axes)} {row.kind}": row.sent for row in plan.moved}
    stream = STREAM // 2  # of a stage's rows, all micro-batches
    assert found["tensor all-gather"] == one_way((2 * 8 + 2) * stream, 2)
    assert found["tensor reduce-scatter"] == one_way((2 * 4 + 2) * stream, 2)
    assert found["pipe collective-permute"] == (11 + 11) * stream // 4 // 2


def test_a_recomputed_ring_sends_keys_round_again():
    """In each of two layers, but for its first hop, where XLA sees that it is the backward pass's:
    jaxlib 0.10 does."""
    _, plan = plan_of("mesh.context=4", "remat.policy=full")
    (ring,) = (row for row in plan.moved if row.kind == "collective-permute")
    assert ring.formula == 2 * (3 + 3 + 3 + 4) * STREAM // 4
    assert ring.formula - ring.sent in (0, 2 * STREAM // 4)


@pytest.mark.parametrize(
    ("zero", "layout"),
    [
        (0, "mesh.fsdp=8 layout.zero=0"),
        (1, "mesh.fsdp=8 layout.zero=1 train.microbatches=2"),
        (2, "mesh.fsdp=8 layout.zero=2 train.microbatches=2"),
        (3, "mesh.fsdp=8 train.microbatches=2"),
    ],
)
def test_bytes_at_rest_are_those_of_the_table(zero, layout):
    """Of layouts that have a contract, so their steps are compiled."""
    config, plan = plan_of(*layout.split())
    assert config.layout.zero == zero
    found = Counter()
    for held in plan.held:
        found[held.what, "cut" if held.role in ("embedding", "matrix") else "whole"] += (
            held.replicated + held.sharded
        )
        assert held.role == "norm" or held.replicated + held.sharded == held.formula
    whole = {stage: PSI // (8 if zero >= stage else 1) for stage in (1, 2, 3)}
    assert found == {
        ("parameters", "cut"): 4 * whole[3],
        ("optimizer state", "cut"): 8 * whole[1],
        ("gradient sums", "cut"): 4 * whole[2],
        ("parameters", "whole"): 4 * NORMS,
        ("optimizer state", "whole"): 8 * NORMS,
        ("gradient sums", "whole"): 4 * NORMS,
    }
    batch, counters = 5 * 4 * TOKENS // 8, 5 * 4  # the position has two words
    at_rest = sum(size for (what, _), size in found.items() if what != "gradient sums")
    assert plan.memory.arguments == at_rest + batch + counters


@pytest.mark.parametrize("policy", ["none", "full"])
def test_zero_3_keeps_no_gathered_weight_for_the_backward_pass(policy):
    """Of sixteen more layers, whose weights are much larger than activations, temporary bytes hold
    the gradients of the shards several times over, but no layer's gathered weights once.
    """
    weights = "model.d_model=64", "model.d_ff=512", "train.seq_len=4", "train.batch_size=8"
    one_layer = 4 * (2 * 64 * 16 + 2 * 64 * 8 + 3 * 64 * 512)

    def temporaries(layers):
        shape = (*weights, "model.head_dim=4", f"remat.policy={policy}")
        _, plan = plan_of("mesh.fsdp=8", *shape, f"model.layers={layers}")
        return plan.memory.temporaries

    grown = (temporaries(20) - temporaries(4)) / 16
    assert one_layer / 8 < grown < one_layer / 2


def test_the_command_prints_the_map_and_the_same_as_json(small_config, tmp_path, capsys):
    path = tmp_path / "small.yaml"
    path.write_text(to_yaml(small_config))
    assert main(["plan", str(path)]) == 0
    text = capsys.readouterr().out
    assert "data=2 · fsdp=2 · tensor=2, zero 3, on 8 × cpu" in text
    assert "not understood" not in text
    assert main(["plan", str(path), "--json"]) == 0
    captured = capsys.readouterr()
    plan = json.loads(captured.out)
    assert captured.err == "meshwright: compiling the step for 8 × cpu\n"
    assert plan["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
    assert plan["unexplained"] == 0
    assert plan["memory"]["fits"] is None
    for row in plan["moved"]:
        assert f"{row['sent']:,}" in text


def test_a_step_that_does_not_fit_says_by_how_much(small_config, tmp_path, capsys, monkeypatch):
    path = tmp_path / "small.yaml"
    path.write_text(to_yaml(override(small_config, "model.layers=1")))
    monkeypatch.setattr(plans, "device_memory", lambda device: 1000)
    assert main(["plan", str(path)]) == 1
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("does not fit in 1,000: ") and last.endswith(" too many")


def test_what_the_compiler_refuses_is_one_line(small_config, tmp_path, capsys, monkeypatch):
    class Lowered:
        def compile(self, options):
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
                "space hbm. Used 20.10G of 15.75G hbm. Exceeded hbm capacity by 4.35G.\n\nTotal"
            )

    class Step:
        lower = staticmethod(lambda *shapes: Lowered())

    monkeypatch.setattr(plans, "make_train_step", lambda *_: Step)
    path, reason = (
        tmp_path / "small.yaml",
        ("the step does not fit a cpu: Used 20.10G of 15.75G hbm. Exceeded hbm capacity by 4.35G."),
    )
    path.write_text(to_yaml(small_config))
    assert main(["plan", str(path)]) == 1
    compiling = "meshwright: compiling the step for 8 × cpu\n"
    assert capsys.readouterr().err == f"{compiling}meshwright: {reason}\n"
    assert main(["plan", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found == {"memory": {"fits": False}, "reason": reason}
    *_, last = memory_table(small_config, jax.devices()).splitlines()
    assert last.split("step")[1].split("  ")[-1].strip() == "does not fit"


def test_a_loop_of_unknown_length_is_said(small_config, monkeypatch):
    endless = Collective("all-gather", ("fsdp",), "f32", 7, 3, True, "a/b", False)
    whole = replace(endless, at_least=False)
    compiled = mock.MagicMock()
    compiled.memory_analysis.return_value = SimpleNamespace(
        argument_size_in_bytes=1, temp_size_in_bytes=2
    )
    monkeypatch.setattr(plans, "compile_step", lambda *_: (mock.MagicMock(), compiled))
    for found, times, said in (
        ((endless, whole), "≥6", True),
        ((whole, whole), " 6", False),
    ):
        monkeypatch.setattr(plans, "read_program", lambda *_, found=found: Program(found, ()))
        plan = make_plan(small_config, jax.devices())
        (row,) = (row for row in plan.moved if row.sent)
        assert (row.times, row.sent, row.at_least) == (6, 42, said)
        lines = list(describe_plan(plan))
        assert any(line.startswith("fsdp: all-gather") and times in line for line in lines)
        assert any(line.startswith("≥: in loops whose length") for line in lines) == said


def test_what_experts_send_is_what_the_formula_says():
    """With a capacity of twice the even share: forward 2·k·T·h·(P-1)/P times it, backward as much;
    C = 2·T·k/P rows, a gate and an expert's number with them, the gate's gradient back."""
    experts = ("model.moe.experts=4", "model.moe.capacity_factor=2.0", "model.moe.routing_group=4")
    _, plan = plan_of("mesh.expert=2", "mesh.fsdp=2", "mesh.tensor=2", *experts)
    (row,) = (row for row in plan.moved if row.kind == "all-to-all")
    tokens, layers, choices = TOKENS // 4, 2, 2
    sent = layers * 2 * tokens * choices * (4 * 16 * 4 + 3 * 4)
    assert (row.axes, row.sent) == (("expert",), sent // 2)
    assert plan.unexplained == 0 and plan.unknown == ()
    assert all(row.sent == row.formula for row in plan.moved)


def test_dropless_experts_send_one_round_a_layer_that_is_known_of():
    """C = 1.25·T·k/P rows of a pair, and none kept: the backward pass sends a row again, its gate
    and its expert's number with it, then two gradients of a row and one of its gate."""
    _, plan = plan_of("mesh.expert=4", "mesh.fsdp=2", "model.moe.experts=4", "remat.policy=full")
    (row,) = (row for row in plan.moved if row.kind == "all-to-all")
    rows, layers = 4 * 20, 2  # of 32 tokens, two choices each
    sent = layers * rows * (5 * 16 * 4 + 2 * 8 + 4) * 3 // 4
    assert (row.axes, row.times, row.at_least) == (("expert",), 10 * layers, True)
    assert row.sent == row.formula == sent
    assert (plan.unexplained, plan.unknown) == (0, ())


LATENT = (
    *("model.mixer=mla", "model.kv_heads=null", "model.mla.kv_rank=8", "model.mla.q_rank=12"),
    *("model.mla.nope_dim=4", "model.mla.rope_dim=2", "model.mla.value_dim=6"),
)
PATTERN = ("model.layers=4", "model.window_pattern=[4,null]", "model.qk_norm=all")


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (LATENT, "mesh.fsdp=2 mesh.tensor=4 remat.policy=full"),
        (LATENT, "mesh.tensor=2 mesh.context=4 layout.context=zigzag"),
        ((*LATENT, "model.norm=post"), "mesh.tensor=4 layout.sequence_parallel=false"),
        (PATTERN, "mesh.fsdp=4 mesh.tensor=2"),
        ((*PATTERN, "model.norm=sandwich"), "mesh.tensor=2 mesh.context=4"),
    ],
)
def test_other_kinds_of_layers_send_what_they_say(model, layout):
    _, plan = plan_of(*layout.split(), *model)
    assert (plan.unexplained, plan.unknown) == (0, ())
    assert all(row.sent == row.formula for row in plan.moved)


@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        (("model.layers=5", "model.window_pattern=[4,null]"), "1f1b"),
        (("model.layers=5", "model.window_pattern=[4,null]"), "zb_h1"),
        ((*LATENT, "model.layers=6", "model.moe.experts=4", "model.dense_layers=2"), "interleaved"),
    ],
)
def test_stages_that_differ_send_what_the_first_one_does(model, schedule):
    """No branch that it does not take is counted."""
    layout = "mesh.pipe=2", "mesh.tensor=2", "train.microbatches=4", f"layout.schedule={schedule}"
    _, plan = plan_of(*layout, *model)
    assert (plan.unexplained, plan.unknown) == (0, ())
    sent, formula = (sum(getattr(row, name) for row in plan.moved) for name in ("sent", "formula"))
    assert sent > 0.8 * formula  # XLA sends less where it sees the same gather twice
