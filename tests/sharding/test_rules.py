import pytest

from meshwright.models.config import ModelConfig
from meshwright.sharding.config import MESH_AXES, NOT_BUILT_AXES, LayoutConfig, MeshConfig
from meshwright.sharding.rules import RULES, Dim, mesh_sizes, resolve

ONE = dict.fromkeys(MESH_AXES, 1)


def settle(dims, rules=None, sequence_parallel=True, mode="ring", ulysses=None, **sizes):
    config = LayoutConfig(
        rules=rules or {}, sequence_parallel=sequence_parallel, context=mode, ulysses=ulysses
    )
    return resolve(config, ONE | sizes, dims)


@pytest.mark.parametrize(
    ("dim", "sizes", "message"),
    [
        (("heads", 6, "model.heads"), {"tensor": 4}, r"^model\.heads=6 .* mesh\.tensor=4$"),
        (("mlp", 10, "model.d_ff"), {"tensor": 4}, r"^model\.d_ff=10 .* mesh\.tensor=4$"),
        (("seq", 9, "train.seq_len"), {"tensor": 2}, r"^train\.seq_len=9 .* mesh\.tensor=2$"),
        (
            ("seq", 12, "train.seq_len"),
            {"tensor": 4, "context": 2},
            r"^train\.seq_len=12 .* mesh\.context=2 · mesh\.tensor=4$",
        ),
        (
            ("batch", 12, "train.batch_size"),
            {"data": 2, "fsdp": 4, "tensor": 2},
            r"^train\.batch_size=12 .* mesh\.data=2 · mesh\.fsdp=4$",
        ),
    ],
)
def test_indivisible_dims_name_keys_and_both_numbers(dim, sizes, message):
    with pytest.raises(ValueError, match=message):
        settle([Dim(*dim)], **sizes)


@pytest.mark.parametrize(
    ("mode", "context", "ulysses", "chunks"),
    [
        *((mode, 1, 1, 1) for mode in ("ring", "zigzag", "ulysses", "all_gather", "usp")),
        ("ring", 4, 1, 1),
        ("zigzag", 4, 1, 8),
        ("all_gather", 4, 1, 8),
        ("ulysses", 4, 4, 1),
        ("usp", 2, 2, 1),
        ("usp", 8, 2, 8),
    ],
)
def test_how_attention_goes_over_context(mode, context, ulysses, chunks):
    resolved = settle([], mode=mode, context=context)
    assert (resolved.ulysses, resolved.chunks) == (ulysses, chunks)


@pytest.mark.parametrize("mode", ["ring", "zigzag", "ulysses", "all_gather"])
def test_neighbours_are_for_usp_alone(mode):
    with pytest.raises(ValueError, match=rf"ulysses=4 is not read by layout\.context={mode}, only"):
        LayoutConfig(context=mode, ulysses=4)


@pytest.mark.parametrize(
    ("dim", "sizes", "message"),
    [
        (
            ("heads", 12, "model.heads"),
            {"mode": "ulysses", "context": 4, "tensor": 2},
            r"^model\.heads=12 on mesh\.tensor=2 leaves 6 heads, not a multiple of the 4 devices "
            r"among which layout\.context=ulysses on mesh\.context=4 exchanges them; write "
            r"layout\.context=zigzag$",
        ),
        (
            ("heads", 6, "model.heads"),
            {"mode": "usp", "context": 8, "ulysses": 4},
            r"^model\.heads=6 on mesh\.tensor=1 leaves 6 heads, not a multiple of the 4 devices",
        ),
        (
            ("seq", 12, "train.seq_len"),
            {"mode": "zigzag", "context": 4},
            r"^train\.seq_len=12 is not a multiple of the 8 chunks that layout\.context=zigzag on "
            r"mesh\.context=4 deals out; write layout\.context=ring$",
        ),
        (
            ("seq", 8, "train.seq_len"),
            {"mode": "usp", "context": 6, "ulysses": 4},
            r"^layout\.ulysses=4 does not divide mesh\.context=6$",
        ),
    ],
)
def test_what_a_way_over_context_cannot_cut_is_refused(dim, sizes, message):
    with pytest.raises(ValueError, match=message):
        settle([Dim(*dim)], **sizes)


def test_every_dim_of_a_model_that_divides_keeps_the_table():
    dims = ModelConfig(d_model=64, heads=8, kv_heads=4, d_ff=128).dims()
    resolved = settle(dims, fsdp=2, tensor=4)
    assert (dict(resolved.rules), resolved.kv_copies, resolved.notes) == (RULES, 0, ())


def test_the_stored_vocabulary_divides_whatever_its_real_size():
    settle(ModelConfig(vocab_size=257, heads=8, d_model=64).dims(), tensor=8)
    with pytest.raises(ValueError, match=r"model\.vocab_size.*384.*mesh\.tensor=5"):
        settle(ModelConfig(vocab_size=257, heads=5, d_model=60, d_ff=10).dims(), tensor=5)


@pytest.mark.parametrize(
    ("kv_heads", "tensor", "copies"),
    [(1, 4, 4), (2, 4, 4), (2, 8, 8), (3, 2, 6), (6, 4, 12), (4, 6, 12)],
)
def test_kv_heads_that_tensor_does_not_divide_are_repeated(kv_heads, tensor, copies):
    resolved = settle([Dim("kv_heads", kv_heads, "model.kv_heads")], tensor=tensor)
    assert resolved.kv_copies == copies
    assert dict(resolved.rules)["kv_heads"] == ()
    (note,) = resolved.notes
    assert f"model.kv_heads={kv_heads} on mesh.tensor={tensor}" in note and str(copies) in note


def test_kv_heads_that_tensor_divides_are_cut():
    resolved = settle([Dim("kv_heads", 8, "model.kv_heads")], tensor=4)
    assert dict(resolved.rules)["kv_heads"] == ("tensor",)


def test_an_indivisible_embed_is_replicated_with_a_note():
    resolved = settle([Dim("embed", 66, "model.d_model")], fsdp=4)
    assert dict(resolved.rules)["embed"] == ()
    assert resolved.notes == (
        "model.d_model=66 is not a multiple of mesh.fsdp=4: replicated instead",
    )


def test_without_sequence_parallelism_tokens_are_not_cut_over_tensor():
    resolved = settle([Dim("seq", 9, "train.seq_len")], sequence_parallel=False, tensor=2)
    assert dict(resolved.rules)["seq"] == ("context",)


def test_embed_may_be_cut_over_more_axes():
    resolved = settle(
        [Dim("embed", 12, "model.d_model")], {"embed": ["data", "fsdp"]}, data=2, fsdp=2
    )
    assert dict(resolved.rules)["embed"] == ("data", "fsdp")
    resolved = settle(
        [Dim("embed", 6, "model.d_model")], {"embed": ["data", "fsdp"]}, data=2, fsdp=2
    )
    assert "model.d_model=6 is not a multiple of mesh.data=2 · mesh.fsdp=2" in resolved.notes[0]


def test_a_row_written_as_it_is_changes_nothing():
    written = settle([], {name: list(axes) for name, axes in RULES.items()})
    assert written == settle([])


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"mlp": ["fsdp"]}, r"layout\.rules\.mlp: only the row embed .* \[tensor\]"),
        ({"channel": ["fsdp"]}, r"layout\.rules\.channel: only the row embed"),
        ({"embed": ["tensor"]}, r"layout\.rules\.embed: tensor is not one of data, fsdp, expert"),
        ({"embed": ["fsdp", "fsdp"]}, r"layout\.rules\.embed=\[fsdp, fsdp\] names .* twice"),
        ({"embed": ["model"]}, r"layout\.rules\.embed: model is no mesh axis; .* fsdp"),
        ({"emb": ["fsdp"]}, r"layout\.rules\.emb: no such logical axis; .* embed"),
    ],
)
def test_overrides_that_the_algorithms_do_not_allow(rules, message):
    with pytest.raises(ValueError, match=message):
        settle([], rules)


def test_minus_one_takes_what_is_left():
    assert mesh_sizes(MeshConfig(tensor=2), 8) == ONE | {"data": 4, "tensor": 2}
    assert mesh_sizes(MeshConfig(data=2, fsdp=-1), 8) == ONE | {"data": 2, "fsdp": 4}
    assert mesh_sizes(MeshConfig(data=8, tensor=-1), 8) == ONE | {"data": 8}


@pytest.mark.parametrize(
    ("config", "devices", "message"),
    [
        (MeshConfig(tensor=3), 8, r"mesh\.tensor=3 needs a multiple of 3 devices.* are 8"),
        (MeshConfig(data=3), 8, r"mesh\.data=3 needs 3 devices, but there are 8"),
        (
            MeshConfig(data=8),
            1,
            r"are 1;.*; device\.cpu_devices=8 simulates 8 .* --target needs none",
        ),
        (MeshConfig(tensor=4), 5, r"there are 5; device\.cpu_devices=8 simulates 8 .* --target"),
        (MeshConfig(data=1), 8, r"all of size 1 needs 1 devices, but there are 8"),
        (MeshConfig(data=4, fsdp=4), 8, r"mesh\.data=4 · mesh\.fsdp=4 needs 16 .* are 8"),
    ],
)
def test_sizes_that_do_not_multiply_to_the_devices(config, devices, message):
    with pytest.raises(ValueError, match=message):
        mesh_sizes(config, devices)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor": 0}, r"mesh\.tensor=0: write a positive size"),
        ({"tensor": -2}, r"mesh\.tensor=-2: write a positive size"),
        ({"fsdp": -1}, r"mesh\.data and mesh\.fsdp are both -1"),
        ({"dcn": {"slice": 2}}, r"mesh\.dcn\.slice: no such axis"),
        ({"dcn": {"data": 0}}, r"mesh\.dcn\.data=0: write a positive"),
        ({"data": 4, "dcn": {"data": 3}}, r"mesh\.dcn\.data=3 does not divide mesh\.data=4"),
        *(({axis: 2}, rf"mesh\.{axis}=2: the {axis} axis is not built") for axis in NOT_BUILT_AXES),
    ],
)
def test_impossible_mesh_sections(sizes, message):
    with pytest.raises(ValueError, match=message):
        MeshConfig(**sizes)
