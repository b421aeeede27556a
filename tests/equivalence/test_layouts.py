"""Law 0: loss, metrics and every gradient leaf of one device, in every layout."""

import functools
import math
from itertools import combinations, product

import chex
import jax
import numpy as np
import pytest

from meshwright.sharding import layout as layout_module
from meshwright.sharding import linear
from meshwright.sharding.gradients import scatter_gradients
from meshwright.trainer import microbatches, step
from meshwright.trainer.inspect import verify
from runs import (
    SMALL,
    assert_same_gradients,
    assert_same_metrics,
    gradients,
    layout_gradients,
    make_config,
    reference_gradients,
)

FIRST, PARTS = 4, 3
"""Layouts of the cover that are always compared; parts into which the others are cut."""

DEEP = (*SMALL, "model.layers=4")  # enough for two chunks on two stages
MODES = verify.CHOICES["layout.context"]
AXES = [
    (key.removeprefix("mesh."), size)
    for key, sizes in verify.CHOICES.items()
    if key.startswith("mesh.")
    for size in sizes
]


@functools.cache
def cover():
    return verify.pairwise_cover(make_config(*DEEP))


def choices_of(layout):
    """Value of every key of CHOICES in a layout that leaves the reference's out."""
    first = {key: str(values[0]) for key, values in verify.CHOICES.items()}
    return first | dict(choice.split("=") for choice in layout.split())


def test_the_cover_holds_every_pair_that_eight_devices_allow():
    choices = [(key, str(value)) for key, values in verify.CHOICES.items() for value in values]
    pairs = {(a, b) for a, b in combinations(choices, 2) if a[0] != b[0]}
    pairs -= {
        ((f"mesh.{axis}", str(size)), (f"mesh.{other}", str(more)))
        for (axis, size), (other, more) in product(AXES, AXES)
        if size * more > 8
    }
    # nothing to choose; fewer micro-batches than stages, layers than chunks; a ring in a branch; no
    # heads to exchange where each tensor shard has one, or eight devices four
    pairs -= {(("mesh.context", "1"), ("layout.context", mode)) for mode in MODES[1:]}
    schedules = verify.CHOICES["layout.schedule"]
    pairs -= {(("mesh.pipe", "1"), ("layout.schedule", name)) for name in schedules[1:]}
    pairs -= {(("mesh.context", "8"), ("layout.schedule", name)) for name in schedules[1:]}
    pairs.remove((("layout.schedule", "interleaved"), ("train.microbatches", "1")))
    pairs.remove((("mesh.pipe", "4"), ("layout.schedule", "interleaved")))
    pairs.remove((("layout.context", "zigzag"), ("layout.schedule", "zb_h1")))
    pairs -= {(("mesh.tensor", "4"), ("layout.context", mode)) for mode in ("ulysses", "usp")}
    pairs.remove((("mesh.context", "8"), ("layout.context", "ulysses")))
    pairs.remove((("layout.sequence_parallel", "false"), ("layout.overlap", "ring")))
    assert {
        pair for layout in cover() for pair in combinations(choices_of(layout).items(), 2)
    } == pairs
    ways = {tuple(choices_of(layout)[key] for key in verify.TOGETHER) for layout in cover()}
    modes = ("true", "none"), ("true", "ring"), ("false", "none")
    assert ways == {(tensor, *mode) for tensor in "124" for mode in modes}
    assert len(set(cover())) == len(cover())
    for layout in cover():
        chosen = choices_of(layout)
        assert 1 < math.prod(int(chosen[key]) for key in chosen if key.startswith("mesh.")) <= 8


def test_the_first_layouts_of_the_cover_equal_one_device():
    assert_equal_one_device(cover()[:FIRST])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_other_layout_of_the_cover_equals_one_device(part):
    assert_equal_one_device(cover()[FIRST:][part::PARTS])


def assert_equal_one_device(layouts):
    results = list(verify.compare(make_config(*DEEP), layouts))
    assert [result.layout for result in results] == layouts
    assert not [result for result in results if not result.equal]


@pytest.mark.parametrize("zero", [1, 3])
def test_gradients_that_are_scattered_side_by_side_equal_one_device(zero, monkeypatch):
    """As on a torus of 2 × 4 chips."""
    monkeypatch.setattr(layout_module, "torus_sides", lambda mesh: {"fsdp": (2, 4)})
    config = make_config(*SMALL, "mesh.fsdp=8", f"layout.zero={zero}")
    metrics, grads = layout_gradients(config)
    expected, expected_grads = gradients(*SMALL)
    assert_same_metrics(metrics, expected)
    assert_same_gradients(grads, expected_grads)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [(0, 1), (2, 3)])
def test_every_stage_of_zero_on_every_data_and_fsdp_of_eight(stages):
    meshes = [
        *(f"mesh.data={8 // n} mesh.fsdp={n}" for n in (1, 2, 4, 8)),
        "mesh.data=2 mesh.fsdp=2 mesh.tensor=2 layout.overlap=ring",
    ]
    layouts = [
        f"{mesh} layout.zero={zero} train.microbatches=4" for zero in stages for mesh in meshes
    ]
    results = list(verify.compare(make_config(*SMALL, "train.batch_size=32"), layouts))
    assert [result.layout for result in results if result.equal] == layouts


RICH = (
    *SMALL,
    "model.bias=all",
    "model.qk_norm=head",
    "model.attention_sink=true",
    "model.attention_softcap=2.0",
    "model.logit_softcap=3.0",
    "train.label_smoothing=0.1",
)
TIED = (
    *SMALL,
    "model.bias=qkv",
    "model.tie_embeddings=true",
    "model.window=5",
    "train.z_loss=0.01",
)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (RICH, "mesh.data=2 mesh.tensor=4 layout.zero=2"),
        (TIED, "mesh.fsdp=2 mesh.tensor=4 layout.sequence_parallel=false train.microbatches=2"),
        (TIED, "mesh.data=2 mesh.fsdp=2 mesh.tensor=2 layout.rules.embed=[data,fsdp]"),
        (TIED, "mesh.data=2 mesh.fsdp=2 mesh.tensor=2 layout.overlap=ring remat.policy=full"),
        (RICH, "mesh.fsdp=2 mesh.tensor=4 layout.overlap=bidirectional"),
        (RICH, "mesh.context=4 mesh.tensor=2 layout.context=zigzag layout.zero=2"),
        (RICH, "mesh.context=2 mesh.tensor=2 layout.context=ulysses model.attention_block=3"),
        (TIED, "mesh.fsdp=2 mesh.context=4 layout.context=usp train.microbatches=2"),
        (
            (*TIED, "train.dropout=0.2"),
            "mesh.context=4 mesh.tensor=2 layout.context=all_gather remat.policy=selective",
        ),
        pytest.param(RICH, "mesh.data=2 mesh.fsdp=4 layout.zero=1", marks=pytest.mark.slow),
        pytest.param(
            TIED,
            "mesh.data=2 mesh.fsdp=2 layout.rules.embed=[fsdp,data] layout.zero=2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_option_of_the_model_in_layouts(model, layout):
    """Also kv heads repeated over tensor, auxiliary losses (C32), ZeRO over two mesh axes, dropout
    of tokens that were dealt out."""
    metrics, grads = gradients(*model, *layout.split())
    expected, expected_grads = gradients(*model)
    assert_same_metrics(metrics, expected)
    assert_same_gradients(grads, expected_grads)


ODD = (
    "model.vocab_size=263",
    "model.vocab_multiple=6",
    "model.layers=3",
    "model.d_model=15",
    "model.heads=6",
    "model.kv_heads=3",
    "model.head_dim=6",
    "model.d_ff=10",
    "train.batch_size=12",
    "train.seq_len=18",
)


def test_odd_sizes():
    """fsdp does not divide d_model, tensor not the kv heads; few sizes are powers of two."""
    metrics, grads = gradients(*ODD, "mesh.fsdp=4", "mesh.tensor=2", "train.microbatches=3")
    expected, expected_grads = reference_gradients(*ODD)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    assert_same_gradients(grads, expected_grads)


def test_recomputation_changes_no_bit():
    metrics, grads = gradients(*SMALL, "remat.policy=full")
    expected, expected_grads = gradients(*SMALL)
    assert metrics == expected
    chex.assert_trees_all_equal(grads, expected_grads)


def test_bf16_computes_near_f32_and_keeps_f32_gradients():
    metrics, grads = gradients(*SMALL, "precision.compute=bf16", "mesh.fsdp=2", "mesh.tensor=2")
    expected, expected_grads = gradients(*SMALL)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-2)
    for name, leaf in grads.items():
        assert leaf.dtype == np.float32
        np.testing.assert_allclose(
            leaf, expected_grads[name], rtol=0, atol=0.1 * np.abs(expected_grads[name]).max()
        )


def skip_reduction(monkeypatch):
    """Gradients are scattered, but not added up over the other axes."""
    monkeypatch.setattr(step, "reduce_gradients", scatter_gradients)


def skip_exit(monkeypatch):
    """Row-parallel products stay partial sums, cut where they should be reduce-scattered."""

    def scatter(tree, plan):
        def one(y):
            tokens = y.shape[1] // plan.layout.size("tensor")
            return jax.lax.dynamic_slice_in_dim(y, jax.lax.axis_index("tensor") * tokens, tokens, 1)

        return jax.tree.map(one, tree) if plan.leave else real_scatter(tree, plan)

    real_scatter = linear._scatter
    monkeypatch.setattr(linear, "_scatter", scatter)


def count_tensor_ranks(monkeypatch):
    """C32: the gradient is right, the logged loss too large by the group size."""

    def share(*arguments):
        value, sums = step_share(*arguments)
        return value, {name: 2 * total for name, total in sums.items()}

    step_share = microbatches.forward_share
    monkeypatch.setattr(microbatches, "forward_share", share)


def test_verify_finds_planted_bugs(monkeypatch):
    """In a layout that equals one device without them."""
    # the first changes nothing on one device: the reference, computed with it, is right
    bugs = [lambda patch: None, skip_reduction, skip_exit, count_tensor_ranks]
    results = verify.compare(make_config(*SMALL), ["mesh.data=2 mesh.tensor=2"] * len(bugs))
    for bug in bugs:
        with monkeypatch.context() as patch:
            bug(patch)
            result = next(results)
        assert result.equal == (bug is bugs[0])
        # where only the logged loss is wrong, gradients are right
        right = bug in (bugs[0], count_tensor_ranks)
        assert (result.gradient < verify.GRADIENT_TOLERANCE) == right
