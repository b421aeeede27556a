"""Texts of TPU and GPU stand here shortened: layouts, tilings and backend_config left out, and
instructions that no collective meets. The TPU ones are of v5e:2x4, jax 0.12."""

import functools
import re
from textwrap import dedent

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.sharding.collectives import all_gather, all_reduce, reduce_scatter
from meshwright.sharding.traffic import taken
from meshwright.trainer.inspect.hlo import KINDS, Collective, read_program
from runs import layout_on, shard_map

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
N8 = {"data": 2, "tensor": 4}


@functools.cache
def layout():
    return layout_on(**MESH)


def compiled(function, *inputs):
    """The program of one device's `function`: compiled text and StableHLO."""
    lowered = shard_map(function, layout(), P(), P()).lower(*inputs)
    return lowered.compile().as_text(), lowered.as_text(debug_info=True)


def read(function, *inputs) -> list[Collective]:
    text, lowered = compiled(function, *inputs)
    program = read_program(text, layout().mesh.shape, lowered)
    assert program.unknown == ()
    return list(program.collectives)


def essence(collectives):
    return [(c.kind, c.axes, c.dtype, c.sent, c.times) for c in collectives]


def ones(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


def ring(axes, size):
    return lambda x: lax.ppermute(x, axes, [(i, (i + 1) % size) for i in range(size)])


def one(line: str, mesh=N8) -> Collective:
    """The collective of a program of one instruction that takes %p = f32[8,4], 128 bytes."""
    program = read_program(entry("%p = f32[8,4]{1,0} parameter(0)", line), mesh)
    assert program.unknown == ()
    (collective,) = program.collectives
    return collective


def entry(*lines: str) -> str:
    return "\n  ".join(["ENTRY %main (p: f32[]) -> f32[] {", *lines]) + "\n}\n"


# --- compiled here -------------------------------------------------------------------------------


def test_a_ring_sends_what_the_formulas_say():
    """N=2 over fsdp, 4 over both axes; x of one device has 8·6 floats, 192 bytes."""
    both = ("fsdp", "tensor")

    def step(x):
        x = all_reduce(x, both, layout()) * 2
        x = all_gather(x, both, 0, layout()) * 2
        x = reduce_scatter(x, "fsdp", 0, layout()) * 2
        x = reduce_scatter(x, "tensor", 0, layout()) * 2
        return lax.all_to_all(x, "tensor", 0, 0, tiled=True)

    assert essence(read(step, ones(8, 6))) == [
        ("all-reduce", both, "f32", 2 * 3 * 192 // 4, 1),
        ("all-gather", both, "f32", 3 * 192, 1),
        ("reduce-scatter", ("fsdp",), "f32", 4 * 192 // 2, 1),
        ("reduce-scatter", ("tensor",), "f32", 2 * 192 // 2, 1),
        ("all-to-all", ("tensor",), "f32", 192 // 2, 1),
    ]


@pytest.mark.parametrize("axes", ["fsdp", ("data", "tensor"), ("data", "fsdp", "tensor")])
def test_a_permute_goes_along_the_axes_in_which_its_ends_differ(axes):
    names = (axes,) if isinstance(axes, str) else axes
    (found,) = read(ring(axes, 2 ** len(names)), ones(8, 6))
    assert essence([found]) == [("collective-permute", names, "f32", 192, 1)]
    assert not found.overlapped


def test_groups_inside_an_axis_are_those_of_no_axis():
    eight = layout_on(tensor=8)

    def gather(x):
        return lax.all_gather(x, "tensor", axis_index_groups=[[0, 1], [2, 3], [4, 5], [6, 7]])

    text = shard_map(gather, eight, P(), P()).lower(ones(8, 6)).compile().as_text()
    (found,) = read_program(text, eight.mesh.shape).collectives
    assert essence([found]) == [("all-gather", None, "f32", 192, 1)]


def test_loops_multiply_and_scopes_are_told():
    def outer(x, _):
        with jax.named_scope("attention"):
            x, _ = lax.scan(lambda x, _: (all_reduce(x, "data", layout()) / 2, None), x, None, 3)
        return ring("tensor", 2)(x), None

    inner, permute = read(lambda x: lax.scan(outer, x, None, 5)[0], ones(4))
    assert essence([inner, permute]) == [
        ("all-reduce", ("data",), "f32", 16, 15),
        ("collective-permute", ("tensor",), "f32", 16, 5),
    ]
    assert "/attention/" in inner.scope and inner.scope.endswith("/psum")
    assert "attention" not in permute.scope


def test_a_loop_whose_end_is_data_counts_as_one_round():
    """In each of five rounds of the loop around it."""

    def run(x, _):
        def goes_on(x):
            return lax.pmax(x.sum(), "tensor") < 10

        x = lax.while_loop(goes_on, lambda x: all_reduce(x, "data", layout()) + 1, x)
        return all_reduce(x, "fsdp", layout()) / 2, None

    found = read(lambda x: lax.scan(run, x, None, 5)[0], ones(4))
    assert sorted((c.axes, c.times, c.at_least) for c in found) == [
        (("data",), 5, True),
        (("fsdp",), 5, False),
        (("tensor",), 5, True),
    ]


def test_every_branch_of_a_conditional_counts():
    def run(x):
        sums = [lambda x, axis=axis: all_reduce(x, axis, layout()) for axis in MESH]
        return lax.switch(x.sum().astype(jnp.int32), sums, x)

    assert sorted(c.axes for c in read(run, ones(4))) == [("data",), ("fsdp",), ("tensor",)]


def test_a_branch_in_a_loop_counts_as_often_as_its_scope_says():
    """Here in each round of an outer loop in two of four of an inner one."""

    def maybe(x, number):
        with jax.named_scope(taken(2, 4)):
            return lax.cond(number < 2, lambda x: 2 * all_reduce(x, "fsdp", layout()), abs, x), None

    def inner(x, _):
        return lax.scan(maybe, x, jnp.arange(4))[0], None

    found = read(lambda x: lax.scan(inner, x, length=3)[0], ones(8))
    assert [(each.kind, each.times) for each in found] == [("all-reduce", 3 * 2)]


def test_a_combined_all_reduce_is_one():
    found = read(lambda x, y: all_reduce((x, y), "tensor", layout()), ones(4), ones(3, 5))
    assert essence(found) == [("all-reduce", ("tensor",), "f32", 2 * (16 + 60) // 2, 1)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("kind", "move", "sent"),
    [
        ("all-reduce", lambda x: lax.psum(x, "tensor"), 48),
        ("all-gather", lambda x: lax.all_gather(x, "tensor"), 48),
        ("reduce-scatter", lambda x: lax.psum_scatter(x, "tensor", tiled=True), 24),
        ("all-to-all", lambda x: lax.all_to_all(x, "tensor", 0, 0, tiled=True), 24),
        ("collective-permute", ring("tensor", 2), 48),
    ],
)
def test_cpu_widens_and_the_lowered_program_knows(kind, move, sent, dtype):
    """48 numbers, of which each kind sends as many as if they had one byte."""
    text, lowered = compiled(move, ones(8, 6, dtype=dtype))
    (widened,) = read_program(text, layout().mesh.shape).collectives
    (found,) = read_program(text, layout().mesh.shape, lowered).collectives
    asked, size, wide = ("bf16", 2, "f32") if dtype == "bfloat16" else ("f8e4m3fn", 1, "f16")
    assert essence([found]) == [(kind, ("tensor",), asked, sent * size, 1)]
    assert essence([widened]) == [(kind, ("tensor",), wide, 2 * sent * size, 1)]


def test_each_part_of_a_combined_collective_has_the_dtype_that_was_asked_for():
    def step(x, y):
        return all_reduce((x, y, y[:2] * 2), "tensor", layout())

    found = read(step, ones(8, 6, dtype=jnp.bfloat16), ones(4, 6))
    assert essence(found) == [("all-reduce", ("tensor",), "bf16+f32", 96 + 96 + 48, 1)]


def test_arrays_of_one_size_are_told_apart_by_their_dims():
    def step(x, y):
        return all_reduce((x, y), "tensor", layout())

    found = read(step, ones(8, 6, dtype=jnp.bfloat16), ones(6, 8))
    assert essence(found) == [("all-reduce", ("tensor",), "bf16+f32", 96 + 192, 1)]


def test_parts_of_different_scopes():
    def step(x, y):
        with jax.named_scope("attention"):
            x = all_reduce(x, "tensor", layout())
        with jax.named_scope("mlp"):
            return x, all_reduce(y, "tensor", layout())

    found = read(step, ones(8, 6, dtype=jnp.bfloat16), ones(4, 5, dtype=jnp.bfloat16))
    assert essence(found) == [("all-reduce", ("tensor",), "bf16", 96 + 40, 1)]


def test_the_nearest_of_two_scopes_counts():
    """`attention/ppermute` ends as `ppermute` does, the scope of the other function's."""
    permute = ring("tensor", 2)

    def step(x, y):
        return jax.jit(jax.named_scope("attention")(permute))(x), jax.jit(lambda y: permute(y))(y)

    found = read(step, ones(8, 6, dtype=jnp.bfloat16), ones(8, 6))
    assert {(c.dtype, c.sent, "attention" in c.scope) for c in found} == {
        ("bf16", 96, True),
        ("f32", 192, False),
    }


def test_what_the_partitioner_adds_keeps_its_own_dtype():
    """A gather of an f32 array in `jit`, of the size of a bf16 one in the shard_map."""
    sharding = jax.NamedSharding(layout().mesh, P("tensor"))
    inner = jax.shard_map(
        lambda x: lax.all_gather(x, "tensor", tiled=True),
        mesh=layout().mesh,
        in_specs=P("tensor"),
        out_specs=P(),
        check_vma=False,
    )

    @functools.partial(jax.jit, out_shardings=jax.NamedSharding(layout().mesh, P()))
    def step(x, y):
        with jax.named_scope("optimizer"):
            y = y * 3
        return inner(x), y

    inputs = [jax.ShapeDtypeStruct((8, 6), d, sharding=sharding) for d in ("bfloat16", "float32")]
    lowered = step.lower(*inputs)
    text = lowered.compile().as_text()
    program = read_program(text, layout().mesh.shape, lowered.as_text(debug_info=True))
    assert program.unknown == ()
    assert {(c.kind, c.dtype, c.sent) for c in program.collectives} == {
        ("all-gather", "bf16", 48),
        ("all-gather", "f32", 96),
    }


# --- spellings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "axes", "sent"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("tensor",), 192),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",), 128),
        ("{{4,0},{5,1},{6,2},{7,3}}", ("data",), 128),
        ("{{0,1},{2,3},{4,5},{6,7}}", None, 128),
        ("{{0,7},{1,6},{2,5},{3,4}}", None, 128),
        ("{{0,1,2,3,4,5,6,7}}", ("data", "tensor"), 224),
        ("{}", ("data", "tensor"), 224),
        ("[2,4]<=[8]", ("tensor",), 192),
        ("[4,2]<=[2,4]T(1,0)", ("data",), 128),
        ("[1,8]<=[8]", ("data", "tensor"), 224),
        ("mesh['data'=2,'tensor'=4] {'tensor'}", ("tensor",), 192),
        ("mesh['data'=2,'tensor'=4] {'tensor','data'}", ("data", "tensor"), 224),
        ("mesh['axis_0'=1,'axis_1'=2,'axis_2'=4] {'axis_1'}", ("data",), 128),
        ("mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0'}", ("tensor",), 192),
        ("mesh['x'=2,'y'=4], device_ids=(0,4,1,5,2,6,3,7) {'x'}", None, 128),
        ("mesh['data'=2,'tensor'=4] {}", (), 0),
    ],
)
def test_spellings_of_replica_groups(groups, axes, sent):
    line = (
        f"%r = f32[8,4]{{1,0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%a"
    )
    assert essence([one(line)]) == [("all-reduce", axes, "f32", sent, 1)]


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        ("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", ("tensor",)),
        ("{{0,3},{1,0},{2,1},{3,2},{4,7},{5,4},{6,5},{7,6}}", ("tensor",)),
        ("{{0,1},{1,2},{2,3},{4,5},{5,6},{6,7}}", ("tensor",)),
        ("{{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}", ("data",)),
        ("{{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}", ("data", "tensor")),
    ],
)
def test_source_target_pairs(pairs, axes):
    line = f"%r = f32[8,4]{{1,0}} collective-permute(%p), channel_id=1, source_target_pairs={pairs}"
    assert essence([one(line)]) == [("collective-permute", axes, "f32", 128, 1)]


@pytest.mark.parametrize(
    ("type_", "sent"),
    [("bf16[8,3]", 48), ("f8e4m3fn[8,3]", 24), ("s4[8,3]", 12), ("pred[5]", 5), ("c64[]", 8)],
)
def test_bytes_of_dtypes(type_, sent):
    program = entry(
        f"%p = {type_} parameter(0)",
        f"%r = {type_} collective-permute(%p), source_target_pairs={{{{0,1}}}}",
    )
    assert [c.sent for c in read_program(program, N8).collectives] == [sent]


def test_a_condition_runs_once_more_than_its_body():
    test = "%r = f32[8,4] all-reduce(%p), replica_groups={}, to_apply=%add"
    text = entry("%p = f32[8,4] parameter(0)", test).replace("ENTRY %main", "%again") + entry(
        "%p = f32[8,4] parameter(0)",
        "%w = f32[8,4] while(%p), condition=%again, body=%again, "
        'backend_config={"known_trip_count":{"n":"7"}}',
    )
    assert [c.times for c in read_program(text, N8).collectives] == [8, 7]


def test_a_body_called_from_two_places_counts_in_both():
    text = dedent("""\
        %shared (q: f32[8]) -> f32[8] {
          %q = f32[8] parameter(0)
          ROOT %r = f32[8] all-reduce(%q), replica_groups={}, to_apply=%add
        }
        %body (q: f32[8]) -> f32[8] {
          %q = f32[8] parameter(0)
          ROOT %c = f32[8] call(%q), to_apply=%shared
        }
        ENTRY %main (p: f32[8]) -> f32[8] {
          %p = f32[8] parameter(0)
          %w = f32[8] while(%p), condition=%no, body=%body, \
    backend_config={"known_trip_count":{"n":"7"}}
          ROOT %c = f32[8] call(%w), to_apply=%shared
        }
        """)
    assert [c.times for c in read_program(text, N8).collectives] == [7, 1]


# --- TPU -----------------------------------------------------------------------------------------

LOOP = """\
%body (wide.param.2: (s32[], bf16[512,512], s32[])) -> (s32[], bf16[512,512], s32[]) {
  %constant.0.clone.1..sunk = s32[] constant(1)
  %wide.param.2 = (s32[], bf16[512,512], s32[]) parameter(0)
  %get-tuple-element.50 = bf16[512,512] get-tuple-element(%wide.param.2), index=1
  %copy.11 = bf16[512,512] copy(%get-tuple-element.50)
  %collective-permute-start = (bf16[512,512], bf16[512,512], u32[], \
    u32[]) collective-permute-start(%copy.11), channel_id=1, \
    source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}, \
    metadata={op_name="jit(f)/while/body/ppermute" stack_frame_id=7}
  %get-tuple-element.49 = s32[] get-tuple-element(%wide.param.2), index=0
  %add.10 = s32[] add(%get-tuple-element.49, %constant.0.clone.1..sunk)
  %collective-permute-done = bf16[512,512] collective-permute-done(%collective-permute-start)
  %convolution_add_fusion.2 = bf16[512,512] fusion(%collective-permute-done, %copy.11), \
    kind=kOutput, calls=%fused
  %get-tuple-element.56 = s32[] get-tuple-element(%wide.param.2), index=2
  ROOT %tuple.17 = (s32[], bf16[512,512], s32[]) tuple(%add.10, %convolution_add_fusion.2, \
    %get-tuple-element.56)
}

%condition (wide.param.1: (s32[], bf16[512,512], s32[])) -> pred[] {
  %constant.1.clone.1 = s32[] constant(6)
  %wide.param.1 = (s32[], bf16[512,512], s32[]) parameter(0)
  %get-tuple-element.29 = s32[] get-tuple-element(%wide.param.1), index=0
  ROOT %lt.3 = pred[] compare(%get-tuple-element.29, %constant.1.clone.1), direction=LT
}

ENTRY %main.0_spmd (param.4: bf16[512,512]) -> bf16[512,512] {
  %constant.3.clone.1 = s32[] constant(0)
  %constant.0.clone.1 = s32[] constant(3)
  %param.4 = bf16[512,512] parameter(0), metadata={op_name="x"}
  %copy.13 = s32[] copy(%constant.3.clone.1)
  %tuple.20 = (s32[], bf16[512,512], s32[]) tuple(%copy.13, %param.4, %constant.0.clone.1)
  %while.10 = (s32[], bf16[512,512], s32[]) while(%tuple.20), condition=%condition, body=%body
  ROOT %get-tuple-element.58 = bf16[512,512] get-tuple-element(%while.10), index=1
}
"""


START, STEP, END = (f"%constant.{name} = s32[]" for name in ("3.clone.1", "0.clone.1", "1.clone.1"))
CARRIED = {"49, %constant.0.clone.1..sunk": "49, %get-tuple-element.56"}  # a step of 3


@pytest.mark.parametrize(
    ("edits", "times"),
    [
        ({}, 6),
        ({f"{END} constant(6)": f"{END} constant(0)"}, 0),
        ({f"{START} constant(0)": f"{START} constant(-2)"}, 8),
        (CARRIED, 2),
        (CARRIED | {f"{END} constant(6)": f"{END} constant(7)"}, 3),
        (CARRIED | {f"{STEP} constant(3)": f"{STEP} parameter(1)"}, None),
        ({"%get-tuple-element.56)": "%add.10)"} | CARRIED, None),
        ({f"{END} constant(6)": f"{END} get-tuple-element(%wide.param.1), index=2"}, 3),
        ({f"{START} constant(0)": f"{START} parameter(1)"}, None),
        ({"direction=LT": "direction=NE"}, None),
        ({"tuple(%add.10,": "tuple(%get-tuple-element.49,"}, None),
        ({"constant(1)": "constant(0)"}, None),
        ({"%condition, body=%body": "%elsewhere, body=%body"}, None),
    ],
)
def test_trips_follow_from_the_condition(edits, times):
    text = LOOP
    for old, new in edits.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    program = read_program(text, N8)
    assert program.unknown == ()
    (found,) = program.collectives
    count = times if times is not None else 1
    assert essence([found]) == [("collective-permute", ("tensor",), "bf16", 2**19, count)]
    assert found.at_least == (times is None)
    assert found.scope == "jit(f)/while/body/ppermute"


def test_a_transfer_is_overlapped_where_something_is_computed_before_it_ends():
    """The counter between start and done is nothing to hide behind; a product is."""
    (exposed,) = read_program(LOOP, N8).collectives
    assert not exposed.overlapped
    product = "  %product = bf16[512,512] convolution(%copy.11, %copy.11), dim_labels=bf_io->bf\n"
    done = "  %collective-permute-done ="
    (hidden,) = read_program(LOOP.replace(done, product + done), N8).collectives
    assert hidden.overlapped
    bookkeeping = '  %b = bf16[512] custom-call(), custom_call_target="AllocateBuffer"\n'
    (exposed,) = read_program(LOOP.replace(done, bookkeeping + done), N8).collectives
    assert not exposed.overlapped


CHAIN = """\
%fused_computation.1 (param_0.2: bf16[64,64]) -> (bf16[64,64], bf16[256,64], s32[2], u32[]) {
  %param_0.2 = bf16[64,64] parameter(0)
  %all-gather.5 = bf16[256,64] all-gather(%param_0.2), channel_id=1, \
    replica_groups=mesh['data'=2,'tensor'=4] {'tensor'}, dimensions={0}, \
    use_global_device_ids=true, frontend_attributes={chain_id="0"}, \
    metadata={op_name="jit(ag)/shard_map/all_gather" stack_frame_id=2}
  ROOT %custom-call.1 = (bf16[64,64], bf16[256,64], s32[2], u32[]) custom-call(%all-gather.5), \
    custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.4 (param_0.5: bf16[64,64], param_1.1: bf16[256,64], param_2.2: s32[2], \
    param_3.2: u32[], param_9.2: bf16[64,64]) -> (bf16[64,64], bf16[64,64], bf16[256,64], \
    s32[2], u32[]) {
  %param_9.2 = bf16[64,64] parameter(4)
  %convolution.3 = bf16[64,64] convolution(%param_9.2, %param_9.2), dim_labels=bf_io->bf
  %param_0.5 = bf16[64,64] parameter(0)
  %all-gather.7 = bf16[256,64] all-gather(%param_0.5), channel_id=1, \
    replica_groups=mesh['data'=2,'tensor'=4] {'tensor'}, dimensions={0}, \
    use_global_device_ids=true, frontend_attributes={chain_id="0"}, \
    metadata={op_name="jit(ag)/shard_map/all_gather" stack_frame_id=2}
  ROOT %tuple.9 = (bf16[64,64], bf16[64,64], bf16[256,64]) tuple(%convolution.3, %param_0.5, \
    %all-gather.7)
}

%fused_computation.3 (param_0.6: bf16[64,64], param_1.2: bf16[256,64], param_2.4: s32[2], \
    param_3.4: u32[]) -> bf16[256,64] {
  %param_0.6 = bf16[64,64] parameter(0)
  %param_1.2 = bf16[256,64] parameter(1)
  %all-gather.9 = bf16[256,64] all-gather(%param_0.6), channel_id=1, \
    replica_groups=mesh['data'=2,'tensor'=4] {'tensor'}, dimensions={0}, \
    use_global_device_ids=true, frontend_attributes={chain_id="0"}, \
    metadata={op_name="jit(ag)/shard_map/all_gather" stack_frame_id=2}
  ROOT %custom-call.3 = bf16[256,64] custom-call(%param_0.6, %param_1.2, %all-gather.9), \
    custom_call_target="AsyncCollectiveDone"
}

ENTRY %main.0_spmd (param.2: bf16[64,64], param.3: bf16[64,64]) -> (bf16[256,64], bf16[64,64]) {
  %param.3 = bf16[64,64] parameter(1)
  %param.2 = bf16[64,64] parameter(0)
  %async-collective-start = (bf16[64,64], bf16[256,64], s32[2], u32[]) fusion(%param.2), \
    kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, calls=%fused_computation.1
  %get-tuple-element.5 = bf16[256,64] get-tuple-element(%async-collective-start), index=1
  %get-tuple-element.4 = bf16[64,64] get-tuple-element(%async-collective-start), index=0
  %fusion.4 = (bf16[64,64], bf16[64,64], bf16[256,64]) fusion(%get-tuple-element.4, \
    %get-tuple-element.5, %param.3), kind=kOutput, calls=%async_collective_fusion.4
  %get-tuple-element.15 = bf16[256,64] get-tuple-element(%fusion.4), index=2
  %get-tuple-element.14 = bf16[64,64] get-tuple-element(%fusion.4), index=1
  ROOT %async-collective-done = bf16[256,64] fusion(%get-tuple-element.14, \
    %get-tuple-element.15), kind=kCustom, calls=%fused_computation.3
}
"""


def test_a_transfer_through_several_fusions_is_one():
    program = read_program(CHAIN, N8)
    assert program.unknown == ()
    (found,) = program.collectives
    assert essence([found]) == [("all-gather", ("tensor",), "bf16", 3 * 64 * 64 * 2, 1)]
    assert found.overlapped and found.scope == "jit(ag)/shard_map/all_gather"


def test_a_transfer_that_no_fusion_starts_is_not_understood():
    program = read_program(CHAIN.replace('"AsyncCollectiveStart"', '"Other"'), N8)
    assert program.collectives == ()
    assert [line.split()[0] for line in program.unknown] == [
        "%all-gather.5",
        "%all-gather.7",
        "%all-gather.9",
        "ROOT",
    ]


def test_a_reduce_scatter_that_became_a_fusion():
    """Padded from 4096 rows to 4160, which travel."""
    text = """\
%all-reduce-scatter.clone.1 (input.2: bf16[4096,4096]) -> bf16[1040,4096] {
  %input.2 = bf16[4096,4096] parameter(0)
  %constant.94 = bf16[] constant(0)
  %pad.2 = bf16[4160,4096] pad(%input.2, %constant.94), padding=0_64x0_0
  %all-reduce.3 = bf16[4160,4096] all-reduce(%pad.2), channel_id=3, \
    replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, \
    to_apply=%region_3.3.clone, frontend_attributes={from-cross-replica-sharding="true"}
  %constant.shard_id_table.3 = u32[8] constant({0, 1, 2, 3, 0, 1, 2, 3})
  %partition-id.11 = u32[] partition-id()
  %dynamic-slice.13 = u32[1] dynamic-slice(%constant.shard_id_table.3, %partition-id.11), \
    dynamic_slice_sizes={1}
  %bitcast.46 = u32[] bitcast(%dynamic-slice.13)
  %constant.95 = u32[] constant(1040)
  %multiply.6 = u32[] multiply(%bitcast.46, %constant.95)
  %constant.96 = u32[] constant(0)
  ROOT %dynamic-slice.14 = bf16[1040,4096] dynamic-slice(%all-reduce.3, %multiply.6, \
    %constant.96), dynamic_slice_sizes={1040,4096}
}

ENTRY %main (p: bf16[4096,4096]) -> bf16[1040,4096] {
  %p = bf16[4096,4096] parameter(0)
  ROOT %fusion.28 = bf16[1040,4096] fusion(%p), kind=kCustom, \
    calls=%all-reduce-scatter.clone.1, metadata={op_name="jit(f)/mlp/reduce_scatter"}
}
"""
    program = read_program(text, N8)
    assert program.unknown == ()
    (found,) = program.collectives
    assert essence([found]) == [("reduce-scatter", ("tensor",), "bf16", 3 * 1040 * 4096 * 2, 1)]
    assert found.scope == "jit(f)/mlp/reduce_scatter" and not found.overlapped


def test_a_small_all_gather_that_became_an_all_reduce():
    found = read_program(
        entry(
            "%broadcast = f32[32] broadcast(%constant.4), dimensions={}",
            "%dynamic-update-slice = f32[32] dynamic-update-slice(%broadcast, %param.1, %bitcast)",
            "ROOT %all-reduce = f32[32] all-reduce(%dynamic-update-slice), channel_id=1, "
            "replica_groups=mesh['data'=2,'tensor'=4] {'tensor'}, use_global_device_ids=true, "
            'to_apply=%add, metadata={op_name="jit(f)/shard_map/all_gather" stack_frame_id=2}',
        ),
        N8,
    ).collectives
    assert essence(found) == [("all-reduce", ("tensor",), "f32", 2 * 3 * 128 // 4, 1)]


def test_a_ragged_all_to_all_counts_its_rows_and_not_their_places():
    found = read_program(
        entry(
            "%rows = bf16[512,2,128] bitcast(%x)",
            "%out = bf16[2048,2,128] bitcast(%y)",
            *(f"%i.{i} = s32[4] parameter({i})" for i in range(4)),
            "%r = bf16[2048,2,128] ragged-all-to-all(%rows, %out, %i.0, %i.1, %i.2, "
            "/*index=5*/%i.3), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}",
        ),
        N8,
    ).collectives
    assert essence(found) == [("ragged-all-to-all", ("tensor",), "bf16", 3 * 2**18 // 4, 1)]


def test_a_fused_collective_hides_nothing():
    move = "%r = f32[8,4] all-reduce(%p), replica_groups={}, to_apply=%add"
    text = entry("%p = f32[8,4] parameter(0)", move).replace("ENTRY %main", "%all-reduce-scatter")
    text += entry(
        "%p = f32[8,4] parameter(0)",
        "%s = (f32[8,4], f32[8,4]) collective-permute-start(%p), source_target_pairs={{0,1}}",
        "%f = f32[1,4] fusion(%p), kind=kCustom, calls=%all-reduce-scatter",
        "%d = f32[8,4] collective-permute-done(%s)",
    )
    assert [c.overlapped for c in read_program(text, N8).collectives] == [False, False]
    computing = text.replace("kCustom", "kOutput")
    assert [c.overlapped for c in read_program(computing, N8).collectives] == [True, False]


# --- GPU, and every platform's start and done ----------------------------------------------------

START_AND_DONE = {
    "all-gather": ("(f32[8,4], f32[32,4])", "replica_groups=[2,4]<=[8], dimensions={0}", 384),
    "all-reduce": ("f32[8,4]", "replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add", 192),
    "reduce-scatter": ("((f32[8,4]), f32[2,4])", "replica_groups=[2,4]<=[8], to_apply=%add", 96),
    "all-to-all": ("((f32[8,4]), f32[8,4])", "replica_groups=[2,4]<=[8], dimensions={0}", 96),
    "collective-permute": ("(f32[8,4], f32[8,4])", "source_target_pairs={{0,1},{1,0}}", 128),
}
PRODUCT = '%gemm = f32[8,8] custom-call(%p, %p), custom_call_target="__cublas$gemm"'


@pytest.mark.parametrize("kind", START_AND_DONE)
@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("sync", ["true", "false"])
def test_start_and_done_are_one(kind, update, between, sync):
    type_, attributes, sent = START_AND_DONE[kind]
    config = f'backend_config={{"collective_backend_config":{{"is_sync":{sync}}}}}'
    program = read_program(
        entry(
            "%p = f32[8,4] parameter(0)",
            f"%s = {type_} {kind}-start(%p), channel_id=5, {attributes}, {config}",
            *([PRODUCT] if between else []),
            *([f"%u = {type_} {kind}-update(%s)"] if update else []),
            f"%d = f32[8,4] {kind}-done({'%u' if update else '%s'})",
            *([] if between else [PRODUCT]),
        ),
        N8,
    )
    assert program.unknown == ()
    (found,) = program.collectives
    assert essence([found]) == [(kind, ("tensor",), "f32", sent, 1)]
    assert found.overlapped == (between and sync == "false")


@pytest.mark.parametrize("between", [False, True])
def test_an_asynchronous_computation(between):
    text = """\
%async_computation.2 (q: f32[8,4]) -> f32[2,4] {
  %q = f32[8,4] parameter(0)
  ROOT %r = f32[2,4] reduce-scatter(%q), channel_id=2, replica_groups=[4,2]<=[2,4]T(1,0)
}, execution_thread="comm"

""" + entry(
        "%p = f32[8,4] parameter(0)",
        "%s = ((f32[8,4]), f32[2,4], u32[]) async-start(%p), calls=%async_computation.2",
        *([PRODUCT] if between else []),
        "%d = f32[2,4] async-done(%s)",
    )
    program = read_program(text, N8)
    assert program.unknown == ()
    (found,) = program.collectives
    assert essence([found]) == [("reduce-scatter", ("data",), "f32", 64, 1)]
    assert found.overlapped == between


# --- what is not understood ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "%r = f32[8,4] all-reduce(%p), channel_id=1, to_apply=%add",
        "%r = f32[8,4] all-reduce(%p), replica_groups={{0,1},{2,3}}, to_apply=%add",
        "%r = f32[8,4] all-reduce(%p), replica_groups={{0,1,2},{3,4,5,6,7}}, to_apply=%add",
        "%r = f32[8,4] all-reduce(%p), replica_groups=[4,4]<=[16], to_apply=%add",
        "%r = f32[8,4] all-reduce(%p), replica_groups=[2,4]<=[2,4]T(1,1), to_apply=%add",
        "%r = f32[8,4] all-reduce(%p), replica_groups=mesh['x'=8] {'x':(1)2}, to_apply=%add",
        "%r = f32[8,4] all-reduce(%p), replica_groups=mesh['x'=8] {'y'}, to_apply=%add",
        "%r = f32[8,4] all-reduce(%p), replica_groups=mesh['x'=4] {'x'}, to_apply=%add",
        "%r = f32[8,4] all-reduce(%q), replica_groups={}, to_apply=%add",
        "%r = (f32[8,4], f32[8]) all-reduce(%p, %q), replica_groups={}, to_apply=%add",
        "%r = f32[8,4] all-reduce(%p",
        "%r = f32[8,4] collective-permute(%p), source_target_pairs={{0,1},{1,8}}",
        "%r = f32[8,4] collective-permute(%p, %p), source_target_pairs={{0,1}}, slice_sizes={{4}}",
        "%r = f32[8,4] all-future(%p), replica_groups={}",
        "%r = f32[8,4] collective-invention(%p), replica_groups={}",
        "r = f32[8,4] all-reduce(p), replica_groups={}",
        "%r = f32[8,4] all-reduce-done(%elsewhere)",
        "%r = (f32[8,4], u32[], token[]) send(%p, %token), channel_id=1",
        '%r = f32[8,4] custom-call(%p), custom_call_target="MyAllReduce"',
        '%r = f32[8,4] custom-call(%p), custom_call_target="tpu_custom_call", '
        'backend_config={"custom_call_config":{"has_communication":true}}',
    ],
)
def test_what_looks_like_communication_is_never_dropped(line):
    program = read_program(entry("%p = f32[8,4] parameter(0)", line), N8)
    assert program.collectives == () and program.unknown == (line,)


def test_a_transfer_to_the_host_is_none_between_devices():
    line = "%r = (f32[], u32[], token[]) send(%p, %t), channel_id=1, is_host_transfer=true"
    program = read_program(entry("%p = f32[] parameter(0)", line), N8)
    assert program.collectives == program.unknown == ()


def test_a_collective_that_nothing_calls_is_reported():
    text = entry("%p = f32[8,4] parameter(0)").replace("ENTRY ", "")
    line = "%r = f32[8,4] all-reduce(%p), replica_groups={}, to_apply=%add"
    program = read_program(text.replace("\n}", f"\n  {line}\n}}") + entry(), N8)
    assert program.collectives == () and program.unknown == (line,)


SPELLED = st.sampled_from(
    [
        "replica_groups={}",
        "replica_groups={{0,1,2,3},{4,5,6,7}}",
        "replica_groups={{0,1},{2,3,4}}",
        "replica_groups=[4,2]<=[2,4]T(1,0)",
        "replica_groups=[4,2]<=[2,2]T(1,0)",
        "replica_groups=mesh['data'=2,'tensor'=4] {'data'}",
        "replica_groups=mesh['data'=2], device_ids=(1,0) {'data'}",
        "source_target_pairs={{0,1},{1,0}}",
        "source_target_pairs={{0,9}}",
        "channel_id=1",
    ]
)
LINES = st.builds(
    lambda kind, start, operand, spelled, end: (kind, start, operand, spelled, end),
    st.sampled_from(KINDS),
    st.sampled_from(["", "-start"]),
    st.sampled_from(["%p", "%p, %p", "%q", ""]),
    SPELLED,
    st.integers(0, 160),
)


@given(st.lists(LINES, max_size=6))
def test_every_collective_is_read_or_reported(lines):
    """Whatever its attributes, and wherever its line breaks off."""
    written = [
        f"%c.{i} = f32[8,4] {kind}{start}({operand}), {spelled}, dimensions={{0}}, "
        f'metadata={{op_name="a/b"}}'[: max(end, 60)]
        for i, (kind, start, operand, spelled, end) in enumerate(lines)
    ]
    text = entry("%p = f32[8,4] parameter(0)", *written)
    opcode = re.compile(f" ({'|'.join(KINDS)})(-start)?\\(")
    program = read_program(text, N8)
    assert len(program.collectives) + len(program.unknown) == sum(
        map(bool, map(opcode.search, written))
    )
    assert set(program.unknown) <= {line.strip() for line in written}
