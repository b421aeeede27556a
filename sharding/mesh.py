"""Devices and the named mesh over them: simulation on CPU, sizes from config, hybrid meshes across
slices.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from .config import MESH_AXES, MeshConfig
from .rules import ZERO_AXES, mesh_sizes

PATIENCE = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 120,
    "xla_cpu_collective_call_terminate_timeout_seconds": 600,
}
"""XLA's flags for how long simulated devices wait for one another. Its own 20 and 40 seconds abort
the process where few cores take turns at long rows, or a laptop sleeps."""


def simulate_devices(count: int) -> None:
    """Make this process's CPU look like `count` devices, which JAX then reports.

    Call it before anything asks JAX for devices: in a notebook, right after the import. Raises
    ValueError with the reason if JAX has started already with other devices in this process.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    added = (f"--{flag}={seconds}" for flag, seconds in PATIENCE.items() if flag not in flags)
    os.environ["XLA_FLAGS"] = " ".join((flags, *added)).strip()
    # JAX refuses the second setting once its backend is up; that is fine where it is up with the
    # same devices
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    found, platform = jax.local_device_count(), jax.default_backend()
    if (found, platform) != (count, "cpu"):
        raise ValueError(
            f"device.cpu_devices={count}: JAX has already started in this process with {found} "
            f"{platform} device(s); simulate before first use, or restart"
        )


def torus_sides(mesh: Mesh) -> dict[str, tuple[int, ...]]:
    """For each axis over which gradients are scattered the sides of the torus that it goes along,
    so that a place on the axis counts row by row over them: (4, 4) where 16 devices are those of
    4 × 4 chips. Of an axis along one side, or of devices without coordinates, its size alone.
    """
    return {
        axis: _sides(np.moveaxis(mesh.devices, MESH_AXES.index(axis), -1)) or (mesh.shape[axis],)
        for axis in ZERO_AXES
    }


def _side_by_side(grid: np.ndarray) -> np.ndarray:
    """The grid with each axis that gradients are scattered over in the order of its devices'
    coordinates, where all its lines allow that: what comes as a ring through several sides of a
    torus then goes row by row, and one side can be scattered over at a time. The other axes stay
    rings, for what goes round them.
    """
    for axis in map(MESH_AXES.index, ZERO_AXES):
        line = np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis])[0]
        if (places := _coordinates(line)) is None:
            continue
        order = np.lexsort(places.T[::-1])
        ordered = np.take(grid, order, axis)
        if _sides(np.moveaxis(ordered, axis, -1)):
            grid = ordered
    return grid


def _sides(lines: np.ndarray) -> tuple[int, ...] | None:
    """The sides of the box that each line of devices [..., n] fills row by row; None where that is
    not so of all, or the box has one side.
    """
    sides = None
    for line in lines.reshape(-1, lines.shape[-1]):
        if (places := _coordinates(line)) is None:
            return None
        ranks = [np.unique(column, return_inverse=True) for column in places.T]
        box = tuple(len(values) for values, _ in ranks)
        if not np.array_equal(
            np.ravel_multi_index([rank for _, rank in ranks], box), np.arange(len(line))
        ):
            return None
        if sides not in (None, box):
            return None
        sides = box
    wide = tuple(side for side in sides or () if side > 1)
    return wide if len(wide) > 1 else None


def _coordinates(line: np.ndarray) -> np.ndarray | None:
    """[device, dim]; None where devices have none, or lie in several slices."""
    places = [getattr(device, "coords", None) for device in line]
    slices = {getattr(device, "slice_index", None) for device in line}
    if None in places or len(slices) > 1:
        return None
    return np.asarray(places)


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of `config` over `devices` (default: all): every axis there is, all of type Auto.
    One may be longer than the side of a torus, as tensor=8 of 4×4×4 chips.

    With `mesh.dcn`, an axis of size a with dcn d has d slices (hosts, where devices belong to no
    slice) as its slow, outer part and a/d devices inside each. Raises ValueError when the sizes do
    not multiply to the device count, or dcn does not multiply to the number of slices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = mesh_sizes(config, len(devices))
    types = (AxisType.Auto,) * len(MESH_AXES)
    slices = len({getattr(device, "slice_index", None) for device in devices})
    if not config.dcn:
        if slices > 1:
            raise ValueError(
                f"mesh.dcn={{}}: the {len(devices)} devices are in {slices} slices; "
                f"write mesh.dcn={{data: {slices}}}"
            )
        grid = mesh_utils.create_device_mesh(
            list(sizes.values()), devices, allow_split_physical_axes=True
        )
        return Mesh(_side_by_side(grid), MESH_AXES, axis_types=types)
    outer = {axis: config.dcn.get(axis, 1) for axis in MESH_AXES}
    for axis, parts in outer.items():
        if sizes[axis] % parts:
            raise ValueError(f"mesh.dcn.{axis}={parts} does not divide mesh.{axis}={sizes[axis]}")
    try:
        grid = mesh_utils.create_hybrid_device_mesh(
            [sizes[axis] // outer[axis] for axis in MESH_AXES],
            list(outer.values()),
            devices,
            process_is_granule=slices == 1,
            should_sort_granules_by_key=True,
            allow_split_physical_axes=True,
        )
    except (ValueError, NotImplementedError) as error:
        written = ", ".join(f"{axis}: {parts}" for axis, parts in config.dcn.items())
        raise ValueError(f"mesh.dcn={{{written}}}: {error}") from None
    return Mesh(grid, MESH_AXES, axis_types=types)
