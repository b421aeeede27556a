"""Layers of several kinds in one model: each equals the plain model, in every layout."""

from itertools import product

import pytest
from numpy.testing import assert_allclose

from meshwright.trainer.config.load import override
from runs import (
    SMALL,
    assert_same_gradients,
    assert_same_metrics,
    gradients,
    make_config,
    reference_gradients,
)

LOCAL_GLOBAL = (
    *SMALL,
    "model.layers=5",
    "model.window_pattern=[4,4,null]",
    "model.local_rope_theta=100.0",
    "model.rope_pattern=[true,true,true,false]",
    "model.norm=sandwich",
    "model.qk_norm=all",
    "model.attention_gate=true",
)
"""The pattern divides neither the layers nor the stages."""

LATENT = (
    *SMALL,
    "model.layers=5",
    "model.mixer=mla",
    "model.kv_heads=null",
    "model.mla.kv_rank=8",
    "model.mla.q_rank=12",
    "model.mla.nope_dim=4",
    "model.mla.rope_dim=2",
    "model.mla.value_dim=6",
    "model.dense_layers=3",
    "model.moe.experts=8",
    "model.moe.shared_experts=1",
    "model.moe.scores=sigmoid",
    "model.moe.groups=4",
    "model.moe.groups_per_token=2",
)
"""Dense layers before experts."""

MIXED = (
    *SMALL,
    "model.layers=4",
    "model.mla.kv_rank=8",
    "model.mla.nope_dim=4",
    "model.mla.rope_dim=2",
    "model.mla.value_dim=6",
    "model.attention_gate=true",
    "model.attention_sink=true",
    "model.norm=post",
    "model.moe.experts=4",
    "model.segments=[{repeats: 2, layers: [{window: 4, ffn: swiglu}, {mixer: mla, ffn: moe}]}]",
)
"""Both mixers and both that follow, by turns."""

MODELS = {"local_global": LOCAL_GLOBAL, "latent": LATENT, "mixed": MIXED}

LAYOUTS = (
    "mesh.data=2 mesh.fsdp=2 mesh.tensor=2",
    "mesh.fsdp=4 mesh.tensor=2 layout.zero=2 layout.sequence_parallel=false train.microbatches=4",
    "mesh.tensor=4 layout.overlap=ring remat.policy=full",
    "mesh.context=4 layout.context=zigzag mesh.tensor=2 remat.policy=selective",
    "mesh.context=4 layout.context=usp mesh.fsdp=2",
)
MORE = (
    "mesh.data=8",
    "mesh.fsdp=8 layout.zero=1",
    "mesh.context=2 layout.context=ring",
    "mesh.context=2 layout.context=all_gather",
)

# A pipeline is compiled layer by layer, so it gets no more of them than it takes.
THREE = {
    "local_global": (*LOCAL_GLOBAL, "model.layers=3", "model.rope_pattern=[true,false]"),
    "latent": (*LATENT, "model.layers=3", "model.dense_layers=2"),
    "mixed": MIXED,
}
"""For two pieces: one layer, and two that differ from it and from each other."""

FOUR = {
    "local_global": (*LOCAL_GLOBAL, "model.layers=4"),
    "latent": (*LATENT, "model.layers=4"),
}
"""For four pieces, of one layer each."""

TWO_PIECES = (
    "mesh.pipe=2 mesh.data=2 mesh.tensor=2 train.microbatches=4 layout.schedule=gpipe",
    "mesh.pipe=2 mesh.context=2 layout.context=ulysses train.microbatches=4 layout.schedule=zb_h1",
    "mesh.pipe=2 layout.schedule=zb_h2 train.microbatches=4 mesh.fsdp=4 layout.zero=2",
)
FOUR_PIECES = (
    "mesh.pipe=4 train.microbatches=4 remat.policy=full",
    "mesh.pipe=2 layout.schedule=interleaved train.microbatches=4 mesh.fsdp=2",
    "mesh.pipe=2 mesh.context=2 layout.context=all_gather layout.schedule=zb_v "
    "train.microbatches=4",
    "mesh.pipe=2 layout.schedule=dualpipe_v train.microbatches=4 mesh.tensor=2",
)


QUICK = {("latent", LAYOUTS[1]), ("latent", LAYOUTS[3]), ("local_global", TWO_PIECES[2])}


def both_models(layouts):
    """All but QUICK are slow: beside it, a window's pattern goes round a ring, and both kinds of
    layers lie on stages with experts."""
    return [
        pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])
        for case in product(("local_global", "latent"), layouts)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_one_device_equals_the_plain_model(name):
    metrics, grads = gradients(*MODELS[name])
    expected, expected_grads = reference_gradients(*MODELS[name])
    objective = sum(metrics.get(part, 0.0) for part in ("loss", "router_aux_loss"))
    assert_allclose(
        [metrics["loss"], objective], [expected["loss"], expected["objective"]], rtol=1e-5
    )
    assert_same_gradients(grads, expected_grads)


def check(model, layout):
    metrics, grads = gradients(*model, *layout.split())
    expected, expected_grads = gradients(*model)
    assert_same_metrics(metrics, expected)
    assert_same_gradients(grads, expected_grads)


@pytest.mark.parametrize(("name", "layout"), both_models(LAYOUTS))
def test_every_axis_equals_one_device(name, layout):
    check(MODELS[name], layout)


@pytest.mark.parametrize(("name", "layout"), both_models(TWO_PIECES))
def test_stages_that_differ_equal_one_device(name, layout):
    check(THREE[name], layout)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("layout", FOUR_PIECES)
def test_chunks_that_differ_equal_one_device(name, layout):
    check(FOUR[name], layout)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["latent", "mixed"])
def test_experts_among_other_layers_equal_one_device(name):
    check(MODELS[name], "mesh.expert=4 mesh.tensor=2")


@pytest.mark.parametrize("name", [pytest.param("latent", marks=pytest.mark.slow), "mixed"])
def test_experts_among_other_layers_of_stages_equal_one_device(name):
    check(THREE[name], "mesh.pipe=2 mesh.expert=2 train.microbatches=4")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, layout) for name in ("local_global", "latent") for layout in MORE),
        *(("mixed", layout) for layout in (LAYOUTS[0], LAYOUTS[3], TWO_PIECES[0])),
        ("local_global", FOUR_PIECES[0]),  # one of the pieces has two layers
    ],
)
def test_more_layouts_equal_one_device(name, layout):
    check(MODELS[name], layout)


def test_stages_that_differ_take_no_permutes():
    config = make_config(*LOCAL_GLOBAL)
    with pytest.raises(ValueError) as error:
        override(config, "mesh.pipe=2", "mesh.context=2", "layout.context=zigzag")
    assert str(error.value) == (
        "model.layers=5 on mesh.pipe=2, 2 pieces in all, has stages whose layers differ: they run "
        "stages in branches, where no permute may run, since all devices take part in it: "
        "layout.context=zigzag on mesh.context=2 sends by permutes; write layout.context="
        "all_gather or ulysses"
    )


def test_a_pattern_that_divides_the_stages_may_go_round_a_ring():
    pattern = (*SMALL, "model.layers=4", "model.window_pattern=[4,null]")
    metrics, grads = gradients(*pattern, "mesh.pipe=2", "mesh.context=2", "train.microbatches=4")
    expected, expected_grads = gradients(*pattern)
    assert_same_metrics(metrics, expected)
    assert_same_gradients(grads, expected_grads)
