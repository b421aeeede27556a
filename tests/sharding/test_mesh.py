import os
import subprocess
import sys
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from meshwright.sharding.config import MESH_AXES, MeshConfig
from meshwright.sharding.mesh import make_mesh, simulate_devices, torus_sides


@dataclass(frozen=True)
class Chip:
    """What `mesh_utils` asks of a device; slices of 2 × 2 chips, two chips a host."""

    id: int
    slice_index: int = 0
    platform: str = "tpu"
    device_kind: str = "fake chip"
    core_on_chip: int = 0

    @property
    def process_index(self):
        return self.id // 2

    @property
    def coords(self):
        return (self.id % 2, self.id // 2 % 2, 0)


class Torus(Chip):
    """One of a slice of 4 × 4."""

    @property
    def coords(self):
        return (self.id % 4, self.id // 4, 0)


TWO_SLICES = [Chip(i, slice_index=i // 4) for i in range(8)]


def test_an_axis_that_is_a_torus_goes_row_by_row():
    chips = [Torus(i) for i in range(16)]
    mesh = make_mesh(MeshConfig(data=1, fsdp=16), chips)
    assert [chip.coords[:2] for chip in mesh.devices.flat] == [
        (x, y) for x in range(4) for y in range(4)
    ]
    assert torus_sides(mesh) == {"data": (1,), "fsdp": (4, 4), "expert": (1,)}


def test_what_is_no_torus_has_no_sides():
    assert torus_sides(make_mesh(MeshConfig())) == {"data": (8,), "fsdp": (1,), "expert": (1,)}
    both = make_mesh(MeshConfig(data=8, dcn={"data": 2}), TWO_SLICES)
    assert torus_sides(both)["data"] == (8,)
    chips = [Torus(i) for i in range(16)]
    sides = torus_sides(make_mesh(MeshConfig(data=1, fsdp=4, tensor=4), chips))
    assert sides == {"data": (1,), "fsdp": (4,), "expert": (1,)}


@pytest.mark.parametrize("sizes", [{}, {"tensor": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_every_mesh_has_all_axes_of_type_auto(sizes):
    mesh = make_mesh(MeshConfig(**sizes))
    assert mesh.axis_names == MESH_AXES
    assert mesh.axis_types == (AxisType.Auto,) * 7
    assert set(mesh.devices.flat) == set(jax.devices())


def test_tensor_neighbours_are_device_neighbours():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    ids = np.vectorize(lambda device: device.id)(mesh.devices).reshape(2, 2, 2)
    np.testing.assert_array_equal(ids, np.arange(8).reshape(2, 2, 2))


def test_a_mesh_may_take_only_some_devices():
    assert list(make_mesh(MeshConfig(), jax.devices()[2:3]).devices.flat) == jax.devices()[2:3]


@pytest.mark.parametrize(
    ("config", "order"),
    [
        (MeshConfig(data=4, fsdp=2, dcn={"data": 2}), (4, 2)),
        (MeshConfig(data=-1, fsdp=2, dcn={"data": 2}), (4, 2)),
        (MeshConfig(fsdp=4, tensor=2, data=1, dcn={"fsdp": 2}), (4, 2)),
    ],
)
@pytest.mark.parametrize("devices", [TWO_SLICES, TWO_SLICES[::-1]], ids=["sorted", "reversed"])
def test_dcn_axis_has_the_slices_as_its_outer_part(config, order, devices):
    grid = make_mesh(config, devices).devices.reshape(order)
    slices = np.vectorize(lambda chip: chip.slice_index)(grid)
    np.testing.assert_array_equal(slices, np.repeat([[0], [0], [1], [1]], 2, axis=1))


def test_devices_of_one_slice_are_split_by_host():
    hosts = [Chip(i) for i in range(4)]
    config = MeshConfig(data=2, tensor=2, dcn={"data": 2})
    grid = make_mesh(config, hosts).devices.reshape(2, 2)
    assert [[chip.process_index for chip in row] for row in grid] == [[0, 0], [1, 1]]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MeshConfig(data=8, dcn={"data": 4}), r"mesh\.dcn=.*4"),
        (MeshConfig(data=8, dcn={"data": 1}), r"mesh\.dcn="),
        (MeshConfig(dcn={"data": 3}), r"mesh\.dcn\.data=3 does not divide mesh\.data=8"),
        (MeshConfig(tensor=2, dcn={"data": 8}), r"mesh\.dcn\.data=8 does not divide mesh\.data=4"),
    ],
)
def test_dcn_that_the_slices_do_not_allow(config, message):
    with pytest.raises(ValueError, match=message) as error:
        make_mesh(config, TWO_SLICES)
    assert "\n" not in str(error.value)


def test_several_slices_need_dcn():
    with pytest.raises(ValueError) as error:
        make_mesh(MeshConfig(data=4, tensor=2), TWO_SLICES)
    assert str(error.value) == (
        "mesh.dcn={}: the 8 devices are in 2 slices; write mesh.dcn={data: 2}"
    )


def test_an_axis_may_be_longer_than_the_side_of_a_torus():
    """tensor=8 on 4 × 4 chips is two rows of them."""
    torus = [Torus(i) for i in range(16)]
    grid = make_mesh(MeshConfig(data=2, tensor=8), torus).devices.reshape(2, 8)
    rows = [{chip.coords[0] // 2 for chip in group} for group in grid]
    columns = [{chip.coords[1] // 2 for chip in group} for group in grid]
    assert {len(found) for found in rows} == {1} or {len(found) for found in columns} == {1}
    assert {chip.id for chip in grid.flat} == set(range(16))


def test_dcn_of_one_slice_is_the_plain_mesh():
    hybrid = make_mesh(MeshConfig(data=4, tensor=2, dcn={"data": 1}))
    assert hybrid == make_mesh(MeshConfig(data=4, tensor=2))


def test_simulating_what_is_there_already_is_no_error():
    simulate_devices(8)
    assert jax.device_count() == 8


def test_devices_wait_for_one_another_but_as_long_as_the_user_says(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_collective_call_terminate_timeout_seconds=7")
    simulate_devices(8)
    assert sorted(os.environ["XLA_FLAGS"].split()) == [
        "--xla_cpu_collective_call_terminate_timeout_seconds=7",
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    ]


def test_simulating_refuses_with_the_reason_where_jax_is_up():
    code = """
import jax, meshwright
jax.config.update("jax_platforms", "cpu")
assert jax.device_count() == 1
try:
    meshwright.simulate_devices(8)
except ValueError as error:
    print(error)
meshwright.simulate_devices(1)
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout == (
        "device.cpu_devices=8: JAX has already started in this process with 1 cpu device(s); "
        "simulate before first use, or restart\n"
    )
