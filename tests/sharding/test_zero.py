"""The parts of parameters that devices update: they are those of the optimizer state, and gathered
they are the parameters again.
"""

from __future__ import annotations

import chex
import jax
import pytest

from meshwright.sharding.layout import specs
from meshwright.sharding.zero import own_parts, whole_params
from meshwright.trainer.state import lay_out
from runs import SMALL, make_config, random_params


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("mesh", ["mesh.fsdp=8", "mesh.data=2 mesh.fsdp=2 mesh.tensor=2"])
def test_parts_are_those_of_the_state_and_make_up_the_whole(mesh, stage):
    config = make_config(*SMALL, *mesh.split(), f"layout.zero={stage}")
    layout, params = lay_out(config), random_params(config)
    at_rest, of_state = specs(params, layout.param_spec), specs(params, layout.state_spec)

    def there_and_back(params):
        own = own_parts(params, layout)
        return own, whole_params(own, layout)

    mapped = jax.shard_map(
        there_and_back, mesh=layout.mesh, in_specs=(at_rest,), out_specs=(of_state, at_rest),
        check_vma=False,
    )  # fmt: skip
    compiled = jax.jit(mapped).lower(params).compile()
    own, whole = compiled(params)
    chex.assert_trees_all_equal(own, params)
    chex.assert_trees_all_equal(whole, params)
    assert ("all-gather" in compiled.as_text()) == (stage in (1, 2))
