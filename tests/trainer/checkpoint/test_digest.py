"""One number per leaf: the same on every mesh and on the host, another after any flipped bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.trainer.checkpoint import digest
from meshwright.trainer.checkpoint.digest import digests, host_digest


def mesh():
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "y"), P(("y", "x")), P(None, None, "x")])
def test_one_number_on_every_layout_and_on_the_host(spec):
    leaf = np.random.default_rng(0).normal(size=(8, 12, 6)).astype(np.float32)
    placed = jax.device_put(leaf, NamedSharding(mesh(), spec))
    assert digests({"leaf": placed})["leaf"].item() == host_digest(leaf)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(), (1,), (5, 7)])
def test_any_flipped_bit_changes_it(dtype, shape):
    rng = np.random.default_rng(1)
    leaf = np.asarray(jnp.asarray(rng.integers(0, 2, shape), dtype))
    expected = host_digest(leaf)
    assert digests({"leaf": jnp.asarray(leaf)})["leaf"].item() == expected
    data = leaf.tobytes()
    bits = [0] if dtype == "bool" else range(8)  # other bits make no bool
    for place in range(len(data)):
        for bit in bits:
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            other = np.frombuffer(bytes(flipped), leaf.dtype).reshape(shape)
            assert host_digest(other) != expected


def test_exchanged_elements_and_another_shape_of_zeros(monkeypatch):
    leaf = np.arange(1000, dtype=np.float32)
    exchanged = leaf.copy()
    exchanged[[3, 700]] = exchanged[[700, 3]]
    assert host_digest(exchanged) != host_digest(leaf)
    monkeypatch.setattr(digest, "CHUNK", 7)
    assert host_digest(leaf) == digests({"leaf": jnp.asarray(leaf)})["leaf"].item()


def test_the_number_never_changes_with_a_version():
    """Checkpoints outlive libraries."""
    leaf = np.linspace(-1, 1, 11, dtype=np.float32)
    assert host_digest(leaf) == 0x2E7B6748
    assert host_digest(np.arange(5, dtype=np.int32)) == 0xD77C954E
