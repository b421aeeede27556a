"""A pipeline by any schedule trains as no pipeline does; its state goes into every other layout."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from meshwright.sharding.layout import is_param
from meshwright.sharding.pipeline import executor
from meshwright.trainer.checkpoint.layer_order import (
    in_model_order,
    in_stage_order,
    model_order_shapes,
)
from meshwright.trainer.config.load import from_yaml, override, to_yaml
from meshwright.trainer.generate import generate
from meshwright.trainer.inspect.memory import inner_programs
from meshwright.trainer.inspect.verify import synthetic_batch
from meshwright.trainer.sampling import Sampling
from meshwright.trainer.state import (
    abstract_state,
    init_params,
    lay_out,
    named_leaves,
    sharded_shapes,
)
from meshwright.trainer.step import make_eval_step, make_train_step, step_shapes
from runs import (
    SGD,
    SMALL,
    assert_same_gradients,
    assert_same_metrics,
    assert_same_params,
    first_devices,
    gradients,
    make_config,
    place,
    train,
)

EIGHT = (*SMALL, "model.layers=8")
SIX = (*SMALL, "model.layers=6")
TIED = (*EIGHT, "model.tie_embeddings=true", "train.z_loss=0.01", "train.dropout=0.2")


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (TIED, "mesh.pipe=2 mesh.fsdp=4 train.microbatches=4"),  # C27
        pytest.param(  # C31, fewer micro-batches than stages
            EIGHT, "mesh.pipe=8 train.microbatches=2", marks=pytest.mark.slow
        ),
        pytest.param(
            EIGHT,
            "mesh.pipe=4 mesh.fsdp=2 train.microbatches=8 layout.zero=2 remat.policy=full "
            "remat.every=2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            TIED,
            "mesh.pipe=2 layout.schedule=interleaved layout.chunks=4 train.microbatches=4",
            marks=pytest.mark.slow,
        ),
        (SIX, "mesh.pipe=4 train.microbatches=4 mesh.context=2 layout.context=zigzag"),
        (SIX, "mesh.pipe=2 layout.schedule=interleaved mesh.tensor=2 train.microbatches=2"),
        (
            TIED,
            "mesh.pipe=4 layout.schedule=zb_v mesh.fsdp=2 layout.zero=1 train.microbatches=4 "
            "remat.policy=full",
        ),
        pytest.param(
            SIX,
            "mesh.pipe=2 layout.schedule=zb_h2 mesh.tensor=2 mesh.context=2 "
            "layout.context=all_gather train.microbatches=4",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            SIX,
            "mesh.pipe=2 layout.schedule=dualpipe_v mesh.context=2 layout.context=ulysses "
            "mesh.fsdp=2 layout.zero=2 train.microbatches=4",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (*EIGHT, "model.moe.experts=4", "model.moe.shared_experts=1"),
            "mesh.pipe=2 layout.schedule=zb_v mesh.expert=2 mesh.fsdp=2 train.microbatches=4",
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(
                (*TIED, "model.layers=16"),
                f"mesh.pipe=8 layout.schedule={name} train.microbatches={microbatches}",
                marks=pytest.mark.slow,
            )
            for name, microbatches in (("zb_h1", 1), ("zb_h2", 16), ("zb_v", 4), ("dualpipe_v", 16))
        ),
        pytest.param(
            TIED, "mesh.pipe=4 layout.schedule=gpipe train.microbatches=8", marks=pytest.mark.slow
        ),
        pytest.param(
            TIED, "mesh.pipe=8 layout.schedule=gpipe train.microbatches=1", marks=pytest.mark.slow
        ),
        pytest.param(
            EIGHT,
            "mesh.pipe=4 layout.schedule=interleaved train.microbatches=8 mesh.fsdp=2 "
            "layout.zero=2 remat.policy=full",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_gradients_equal_those_without_a_pipeline(model, layout):
    """Also layers that stages do not divide, the first and last of which are not all alike."""
    metrics, grads = gradients(*model, *layout.split())
    expected, expected_grads = gradients(*model)
    assert_same_metrics(metrics, expected)
    assert_same_gradients(grads, expected_grads)


INTERLEAVED = (
    *SIX,
    "mesh.pipe=2",
    "layout.schedule=interleaved",
    "layout.chunks=2",
    "train.microbatches=2",
)
"""Six layers in four chunks: two of them hold one layer and padding."""


def test_updates_equal_those_without_a_pipeline():
    """Layer by layer, padding included: momentum, decay, and a norm of which no part counts
    twice."""
    options = "optimizer.clip=0.5", "optimizer.weight_decay=0.1"
    history, state = train(2, *INTERLEAVED, *SGD, *options)
    expected, alone = train(2, *SIX, *SGD, *options)
    for found, want in zip(history, expected, strict=True):
        assert_same_metrics(found, want)
    config = make_config(*INTERLEAVED, *SGD, *options)
    target = model_order_shapes(config, lay_out(config, first_devices(config)))
    assert_same_params(in_model_order(state, target, config), alone)


@pytest.mark.usefixtures("shipped_init")
def test_a_state_goes_into_the_model_s_order_and_back():
    config = make_config(*INTERLEAVED, "optimizer.name=muon", "optimizer.ema=0.9")
    alone = make_config(*SIX)
    layout = lay_out(config, first_devices(config))
    params = init_params(config, layout)
    whole = model_order_shapes(config, layout).params
    held = sharded_shapes(config, layout).params
    ordered = in_model_order(params, whole, config)
    first = named_leaves(init_params(alone, lay_out(alone, first_devices(alone))))
    for name, leaf in named_leaves(ordered).items():
        np.testing.assert_array_equal(leaf, first[name], err_msg=name)
    back = named_leaves(in_stage_order(ordered, held, config))
    for name, leaf in named_leaves(params).items():
        assert back[name].sharding == leaf.sharding
        np.testing.assert_array_equal(back[name], leaf, err_msg=name)
    numbers = config.held_layers()["swiglu"]
    assert numbers == [0, 6, 3, 6, 1, 2, 4, 5]
    up = np.asarray(named_leaves(params)["layers.swiglu.up"])
    assert [bool(layer.any()) for layer in up] == [number < 6 for number in numbers]


@functools.cache
def evaluated(*overrides: str):
    config = make_config(*overrides)
    layout = lay_out(config, first_devices(config))
    params = init_params(config, layout)
    batch = place(synthetic_batch(make_config(*overrides)), make_config(*SIX), layout)
    nll, targets = make_eval_step(config, layout)(params, batch)
    texts = generate(
        params,
        config,
        layout,
        [[1, 2, 3], [4, 5]],
        Sampling(tokens=5, temperature=0.0),
        vocab_size=257,
        end_of_text=256,
    )
    return float(nll), float(targets), texts


def test_evaluation_and_generation_equal_those_without_a_pipeline():
    nll, targets, texts = evaluated(*INTERLEAVED, "mesh.fsdp=2")
    expected, all_targets, same = evaluated(*SIX)
    np.testing.assert_allclose(nll, expected, rtol=1e-5)
    assert (targets, texts) == (all_targets, same)


def test_a_run_keeps_the_table_of_its_file(tmp_path):
    """Whatever becomes of the file; the config that a run writes down opens without it."""
    path = tmp_path / "own.csv"
    path.write_text("F0,F1,,B0,W0,B1,W1\n,F0,BW0,F1,B1,W1")
    layout = "mesh.pipe=2", "train.microbatches=2", f"layout.schedule_file={path}"
    config = make_config(*SMALL, *layout)
    path.unlink()
    assert config.layout.schedule_file == "F0,F1,,B0,W0,B1,W1\n,F0,BW0,F1,B1,W1\n"
    again = from_yaml(to_yaml(config), "config.yaml")
    assert again == config
    schedule = again.pipeline()
    assert (schedule.ticks, schedule.uniform) == (7, False)
    assert override(again, "layout.schedule_file=null", "layout.schedule=zb_h1").pipeline()


@pytest.mark.parametrize(
    ("table", "others", "message"),
    [
        (None, (), "layout.schedule_file=.*own.csv: No such file or directory; write a CSV file"),
        ("F0,,BW0\n,F0,BW0", (), "layout.schedule_file: stage 0, tick 2: B0 needs B .* at tick 3"),
        ("F0,,,BW0\n,F0,BW0", ("mesh.pipe=1",), "mesh.pipe=1, but .* 2 stages: write mesh.pipe=2"),
        (
            "F0,,,BW0\n,F0,BW0",
            ("train.microbatches=2",),
            "train.microbatches=2, but .* 1 microbatches: write train.microbatches=1",
        ),
        ("F0,,,BW0\n,F0,BW0", ("layout.schedule=zb_v",), "layout.schedule=zb_v is not read where"),
        (
            "F0,,,BW0\n,F0,BW0",
            ("mesh.context=2",),
            "a table of one's own runs stages in branches, .* layout.context=ring .* or "
            "layout.schedule_file=null",
        ),
        (
            "F0,BW0",
            ("mesh.pipe=1",),
            "layout.schedule_file: a table of one stage passes nothing on",
        ),
    ],
)
def test_a_table_that_cannot_be_is_refused(tmp_path, table, others, message):
    if table is not None:
        (tmp_path / "own.csv").write_text(table)
    file = f"layout.schedule_file={tmp_path / 'own.csv'}"
    with pytest.raises(ValueError, match=message):
        make_config(*SMALL, "mesh.pipe=2", file, *others)


def temporary_bytes(schedule: str, microbatches: int) -> int:
    """Rows of a micro-batch are as many whatever their number: a step takes more of them."""
    config = make_config(
        *EIGHT,
        "mesh.pipe=4",
        f"layout.schedule={schedule}",
        f"train.microbatches={microbatches}",
        f"train.batch_size={2 * microbatches}",
    )
    layout = lay_out(config, jax.devices()[:4])
    step = make_train_step(config, layout).lower(*step_shapes(config, layout))
    return step.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_activations_of_1f1b_do_not_grow_with_micro_batches_and_those_of_gpipe_do():
    flat = [temporary_bytes("1f1b", m) for m in (8, 32)]
    growing = [temporary_bytes("gpipe", m) for m in (8, 32)]
    assert flat[1] < 1.05 * flat[0]
    assert growing[1] > 2 * growing[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("model.layers=8", "mesh.pipe=2", "train.microbatches=3"),
            "train.batch_size=16 is not a multiple of train.microbatches=3",
        ),
        (
            ("mesh.pipe=4",),
            "model.layers=2 on mesh.pipe=4, 4 pieces in all, leaves some without any; write at "
            "least 4",
        ),
        (("mesh.pipe=-1",), "mesh.pipe=-1: .*; write the number of stages"),
        (
            ("mesh.pipe=2", "layout.schedule=interleaved", "model.layers=4"),
            "layout.schedule=interleaved on mesh.pipe=2 with train.microbatches=1: .*: write "
            "microbatches=2",
        ),
        (("layout.chunks=2",), "layout.chunks=2 is not read by layout.schedule=1f1b"),
        (
            ("mesh.pipe=2", "mesh.context=2", "layout.schedule=zb_h1", "layout.context=zigzag"),
            "layout.schedule=zb_h1 .* layout.context=zigzag on mesh.context=2 .*; write "
            "layout.context=all_gather or ulysses",
        ),
        (
            ("mesh.pipe=2", "mesh.tensor=2", "layout.schedule=zb_h2", "layout.overlap=ring"),
            "layout.schedule=zb_h2 .* layout.overlap=ring on mesh.tensor=2 .*; write "
            "layout.overlap=none",
        ),
        (
            ("model.layers=4", "mesh.pipe=2", "layout.schedule=dualpipe_v"),
            "layout.schedule=dualpipe_v on mesh.pipe=2 with train.microbatches=1: .*: write "
            "microbatches=4",
        ),
        (
            ("model.layers=6", "mesh.pipe=2", "remat.policy=full", "remat.every=2"),
            "model.layers=6 on mesh.pipe=2, 2 pieces in all, has 3 repeat.* in a "
            "row, not a multiple of remat.every=2",
        ),
        (
            ("mesh.pipe=2", "remat.policy=offload"),
            "remat.policy=offload on mesh.pipe=2: .*; write remat.policy=selective or full",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_both_numbers(overrides, message):
    with pytest.raises(ValueError, match=message):
        make_config(*SMALL, *overrides)


REMAT = pytest.mark.parametrize(
    "remat",
    [(), ("remat.policy=full",), ("remat.policy=full", "remat.every=2")],
    ids=["none", "full", "2"],
)


@functools.cache
def stage_program(*overrides):
    """The step of a pipeline, traced, and the shapes that wait in it: F's stash, and taps."""
    waiting = []

    def rows(tree, count):
        if isinstance(tree, list):
            waiting.append([leaf.shape for leaf in jax.tree.leaves(tree)])
        return make_rows(tree, count)

    make_rows = executor._rows
    sizes = "model.layers=8", "train.seq_len=8", "mesh.pipe=2", "train.microbatches=4"
    config = make_config(*SMALL, *sizes, *overrides)
    layout = lay_out(config, first_devices(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "_rows", rows)
        traced = make_train_step(config, layout).trace(*step_shapes(config, layout))
    return config, traced.jaxpr, *waiting


@REMAT
def test_no_weight_waits_in_a_buffer(remat):
    """B finds it in the parameters; the stash is activations alone, and scales of norms. Nor do
    the zeros wait that are given as taps."""
    config, _, stash, taps = stage_program(*remat, "layout.schedule=zb_h1")
    *_, whole, none = stage_program(*remat, "layout.schedule=1f1b")
    params = jax.tree.leaves(abstract_state(config).params.layers, is_leaf=is_param)
    weights = {p.get_value().shape[-len(p.axes) :] for p in params if len(p.axes) > 1}
    assert len(stash) > 5
    found = [*stash, *taps]
    assert not [shape for shape in found for weight in weights if shape[-len(weight) :] == weight]
    assert sorted(stash) == sorted(whole)
    assert len(taps) == 4 + 7  # the inputs of four products, the gradients of seven outputs
    assert not none


def products_in(program) -> int:
    """Matrix products that a program's text holds, in all that it calls."""
    return sum(
        (equation.primitive.name == "dot_general") + sum(map(products_in, inner_programs(equation)))
        for equation in program.eqns
    )


@pytest.mark.parametrize("remat", [(), ("remat.policy=full",)], ids=["none", "full"])
def test_a_backward_pass_in_two_multiplies_as_often_as_one_in_one(remat):
    """Both schedules have three programs of ticks: F; F, head and backward; backward. So W computes
    nothing again, whatever the policy."""
    _, whole, *_ = stage_program(*remat, "layout.schedule=1f1b")
    _, apart, *_ = stage_program(*remat, "layout.schedule=zb_h1")
    assert products_in(apart.jaxpr) == products_in(whole.jaxpr) > 2 * 3 * 7
