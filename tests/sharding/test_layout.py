import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from meshwright.sharding.layout import is_param, map_params, specs
from meshwright.sharding.rules import Dim
from meshwright.trainer.state import abstract_state, lay_out
from runs import layout_on, make_config

MATRIX = ("embed", "heads", "head_dim")


@pytest.mark.parametrize(
    ("zero", "param", "accumulator", "state"),
    [
        (0, None, None, None),
        (1, None, None, ("fsdp",)),
        (2, None, ("fsdp",), ("fsdp",)),
        (3, ("fsdp",), ("fsdp",), ("fsdp",)),
    ],
)
def test_zero_stages_cut_one_thing_more_each(zero, param, accumulator, state):
    layout = layout_on(zero=zero, fsdp=2, tensor=2)
    assert layout.param_spec(MATRIX, stack=1) == P(("pipe",), param, ("tensor",), None)
    assert layout.accumulator_spec(MATRIX, stack=1) == P(("pipe",), accumulator, ("tensor",), None)
    assert layout.state_spec(MATRIX, stack=1) == P(("pipe",), state, ("tensor",), None)
    assert layout.gathered("embed") == (param or ())
    assert layout.gathered("heads") == ()


def test_vectors_are_replicated_at_every_stage():
    layout = layout_on(zero=3, fsdp=2)
    assert layout.state_spec(("channel",), stack=1) == P(("pipe",), None)


def test_sizes_of_axes_multiply():
    layout = layout_on(data=2, fsdp=4)
    assert (layout.size("fsdp"), layout.size(("data", "fsdp")), layout.size(())) == (4, 8, 1)


def test_batches_are_cut_over_rows_not_over_tensor():
    assert layout_on(fsdp=2, tensor=2).batch_spec() == P(
        None, ("data", "fsdp", "expert"), "context"
    )


def test_names_that_do_not_exist_and_axes_used_twice():
    layout = layout_on()
    with pytest.raises(ValueError, match="no logical axis 'mpl'; known are layers, vocab, .*mlp"):
        layout.param_spec(("embed", "mpl"))
    with pytest.raises(ValueError, match=r"\('heads', 'mlp'\) would use mesh axis tensor twice"):
        layout.param_spec(("heads", "mlp"))


def test_layouts_are_values():
    dims = [Dim("kv_heads", 1, "model.kv_heads")]
    assert layout_on(dims, tensor=2) == layout_on(dims, tensor=2)
    assert hash(layout_on(dims, tensor=2)) == hash(layout_on(dims, tensor=2))
    assert layout_on(dims, tensor=2) != layout_on(dims, tensor=2, zero=1)


def test_map_params_keeps_the_tree_and_leaves_counters_alone():
    tree = {
        "w": nnx.Param(jnp.ones((3, 4, 2)), axes=("embed", "mlp"), role="matrix"),
        "count": jnp.zeros(()),
    }
    layout = layout_on(fsdp=2, tensor=2)
    found = specs(tree, layout.param_spec)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert found["w"].get_value() == P(("pipe",), ("fsdp",), ("tensor",))
    assert found["count"] == P()
    doubled = map_params(lambda param, value: param.get_value() + value, tree, tree)
    assert is_param(doubled["w"]) and doubled["w"].role == "matrix"
    np.testing.assert_array_equal(doubled["w"].get_value(), 2 * tree["w"].get_value())


@pytest.mark.parametrize("mesh", ["mesh.fsdp=8", "mesh.fsdp=2 mesh.tensor=4", "mesh.data=8"])
@pytest.mark.parametrize("zero", range(4))
def test_every_spec_divides_its_parameter(mesh, zero):
    config = make_config("model.heads=4", "model.kv_heads=1", f"layout.zero={zero}", *mesh.split())
    layout, params = lay_out(config), abstract_state(config).params
    for spec_of in (layout.param_spec, layout.accumulator_spec, layout.state_spec):
        found = specs(params, spec_of)
        for leaf, spec in zip(jax.tree.leaves(params), jax.tree.leaves(found), strict=True):
            layout.sharding(spec).shard_shape(leaf.shape)  # raises where it does not divide
