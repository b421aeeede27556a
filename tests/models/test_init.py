import math
from itertools import combinations

import jax
import numpy as np
import pytest
from flax import nnx

from meshwright.models import init
from meshwright.models.config import ModelConfig
from meshwright.trainer.config import Config
from meshwright.trainer.inspect.verify import global_norm
from meshwright.trainer.state import init_params, lay_out, named_leaves
from runs import make_config

ODD = (
    "model.vocab_size=263",
    "model.vocab_multiple=6",
    "model.layers=3",
    "model.d_model=15",
    "model.heads=2",
    "model.kv_heads=1",
    "model.head_dim=6",
    "model.d_ff=6",
    "model.bias=all",
    "model.qk_norm=head",
    "train.batch_size=24",
    "train.seq_len=16",
)


def drawn(config: Config) -> dict[str, np.ndarray]:
    count = math.prod(config.mesh.sizes().values())
    layout = lay_out(config, jax.devices()[:count])
    return jax.device_get(named_leaves(init_params(config, layout)))


pytestmark = pytest.mark.usefixtures("shipped_init")


@pytest.fixture(scope="module")
def shallow(shipped_init):
    return drawn(make_config("model.layers=2", "model.d_model=64", "model.bias=all"))


@pytest.fixture(scope="module")
def odd(shipped_init):
    return drawn(make_config(*ODD))


@pytest.mark.parametrize(
    "mesh",
    ["mesh.data=8", "mesh.fsdp=4", "mesh.fsdp=3 mesh.tensor=2", "mesh.tensor=2 layout.zero=1"],
)
def test_weights_are_the_same_bits_on_every_mesh(odd, mesh):
    """Case C19. fsdp=4 does not divide d_model=15, fsdp=3 does."""
    found = drawn(make_config(*ODD, *mesh.split()))
    assert list(found) == list(odd)
    for name, leaf in odd.items():
        np.testing.assert_array_equal(found[name], leaf, err_msg=name)


def test_layers_do_not_depend_on_how_many_there_are(shallow):
    deep = drawn(make_config("model.layers=8", "model.d_model=64", "model.bias=all"))
    residual = {"layers.attention.o", "layers.swiglu.down"}
    for name, leaf in shallow.items():
        both = deep[name][:2] if name.startswith("layers.") else deep[name]
        if name in residual:  # a quarter of the layers: half of the divisor
            np.testing.assert_allclose(2 * both, leaf, rtol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(both, leaf, err_msg=name)


def test_standard_deviations_are_those_documented(shallow):
    config = make_config("model.layers=2", "model.d_model=64").model
    width, hidden, residual = config.d_model, config.d_ff, math.sqrt(2 * config.layers)
    expected = {
        "embed": width**-0.5,
        "unembed": width**-0.5,
        "layers.attention.q": width**-0.5,
        "layers.attention.k": width**-0.5,
        "layers.attention.v": width**-0.5,
        "layers.attention.o": width**-0.5 / residual,
        "layers.swiglu.gate": width**-0.5,
        "layers.swiglu.up": width**-0.5,
        "layers.swiglu.down": hidden**-0.5 / residual,
    }
    for name, std in expected.items():
        leaf = shallow[name][: config.vocab_size] if "embed" in name else shallow[name]
        # four standard errors of an estimate from leaf.size draws
        assert abs(leaf.std() / std - 1) < 4 / math.sqrt(2 * leaf.size), name
        assert abs(leaf.mean()) < 4 * std / math.sqrt(leaf.size), name
    for name, leaf in shallow.items():
        if name not in expected:
            assert np.all(leaf == (0.0 if name.endswith("_bias") else 1.0)), name


def test_init_std_replaces_the_default():
    key, config = jax.random.key(0), ModelConfig(layers=2, init_std=0.02)
    plain = init.matrix(key, config, "name", ("embed", "mlp"), (64, 64), fan_in=64)
    residual = init.matrix(key, config, "name", ("embed", "mlp"), (64, 64), 64, residual=True)
    assert isinstance(plain, nnx.Param)
    np.testing.assert_allclose(plain[...].std(), 0.02, rtol=0.05)
    np.testing.assert_allclose(residual[...] * 2, plain[...], rtol=1e-6)
    np.testing.assert_allclose(
        init.embedding(key, config, "name")[...][:257].std(), 0.02, rtol=0.05
    )


def test_padding_rows_are_zero_and_the_last_real_one_is_not(shallow, odd):
    for leaves, size, stored in ((shallow, 257, 384), (odd, 263, 264)):
        for name in ("embed", "unembed"):
            assert leaves[name].shape[0] == stored
            assert not leaves[name][size:].any() and leaves[name][size - 1].all()


def test_no_two_matrices_are_alike(shallow):
    """Each has draws of its own: flat, no two of one size correlate, nor do two layers."""
    matrices = [leaf for leaf in shallow.values() if leaf.std() > 0]
    layers = [layer.ravel() for leaf in matrices if leaf.ndim > 2 for layer in leaf]
    flat = layers + [leaf.ravel() for leaf in matrices if leaf.ndim == 2]
    assert len(flat) == 2 * 7 + 2
    for a, b in combinations(flat, 2):
        if a.size == b.size:
            assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(a.size)


def test_the_seed_is_the_configs(odd):
    other = drawn(make_config(*ODD, "run.seed=1"))
    assert global_norm({name: other[name] - odd[name] for name in odd}) > 1
