"""Policies: what is recomputed, counted in the program, and which configs are refused."""

import re
from typing import get_args

import jax
import pytest

from meshwright.models.config import Saved
from meshwright.trainer.config.load import override
from meshwright.trainer.state import abstract_state, lay_out
from meshwright.trainer.step import make_train_step, step_shapes
from runs import SMALL, make_config


def lowered(*overrides: str) -> str:
    """StableHLO of the train step."""
    config = make_config(*SMALL, *overrides)
    layout = lay_out(config, jax.devices()[:1])
    step = make_train_step(config, layout)
    return step.lower(abstract_state(config), step_shapes(config, layout)[1]).as_text()


def products(*overrides: str) -> int:
    return len(re.findall(r"stablehlo\.dot_general", lowered(*overrides)))


FORWARD = {"q, k, v": 3, "scores": 1, "context": 1, "out": 1, "gate, up": 2, "down": 1}


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        (("remat.policy=full",), {"q, k, v", "scores", "context", "out", "gate, up"}),
        (("remat.policy=selective",), {"scores", "context"}),
        (("remat.policy=offload",), set()),
        (
            ("remat.policy=selective", "remat.names=[attention.context, attention.logsumexp]"),
            {"q, k, v", "out", "gate, up"},
        ),
        (
            ("remat.policy=offload", "remat.names=[block.input]"),
            {"q, k, v", "scores", "context", "out", "gate, up"},
        ),
    ],
)
def test_what_is_not_saved_is_multiplied_again(policy, again):
    """The last product of a block is never needed again."""
    assert products(*policy) - products() == sum(FORWARD[name] for name in again)


@pytest.mark.parametrize("every", [2, 4])
def test_the_program_grows_neither_with_depth_nor_with_the_period(every):
    overrides = ("remat.policy=full", f"remat.every={every}")
    counts = {products(*overrides, f"model.layers={layers}") for layers in (4, 16)}
    # one layer kept and one recomputed, instead of one recomputed
    once, kept = products("remat.policy=full"), products()
    outside = 3  # of the unembedding: logits, and their two gradients
    assert counts == {once + kept - outside}


def refusal(*overrides: str) -> str:
    with pytest.raises(ValueError) as error:
        override(make_config(*SMALL), *overrides)
    (line,) = str(error.value).splitlines()
    return line


def test_misspelt_names_are_refused_with_the_valid_ones():
    line = refusal("remat.policy=selective", "remat.names=[mlp.hidden, attention.qvk]")
    assert line.startswith("remat.names.1=attention.qvk: ")
    assert all(f"'{name}'" in line for name in get_args(Saved))
    assert line.endswith("; did you mean attention.qkv?")


@pytest.mark.parametrize("policy", ["none", "full"])
def test_names_need_a_policy_that_reads_them(policy):
    line = refusal(f"remat.policy={policy}", "remat.names=[mlp.hidden]")
    assert line == (
        f"remat.names=[mlp.hidden] is not read by remat.policy={policy}, only by selective, "
        "offload; leave it out: remat.names=null"
    )


def test_a_period_needs_a_policy_and_divides_the_layers():
    assert refusal("remat.every=2") == (
        "remat.every=2 is not read by remat.policy=none, only by full, selective, offload; "
        "leave it out: remat.every=1"
    )
    assert refusal("remat.policy=full", "remat.every=2", "model.layers=7") == (
        "model.layers=7 has 7 repeat(s) of 1 layer(s) in a row, not a multiple of remat.every=2"
    )
