"""The devices that `plan` compiles for: those here, simulated ones, or a TPU topology that nobody
has here. JAX is imported only when they are asked for, after what its compiler for TPU reads.
"""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from typing import Any

from ..config import Config, DeviceConfig
from ..config.load import ConfigError, override

ALONE = "launch.coordinator=null", "launch.process_id=null", "launch.process_count=1"
"""Overrides of a config that is looked at by one process, whatever a scheduler says."""

WITHOUT_TPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no lock: several may compile at once
    "TPU_SKIP_MDS_QUERY": "1",  # do not ask the cloud what this machine is
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",  # any will do
}
"""Environment in which libtpu compiles for a topology and does not look for a TPU."""

MEMORY = {"TPU v5 lite": 16, "TPU v5": 95, "TPU v6 lite": 32}
"""GiB of one device by `jax.Device.device_kind`, from the vendor's data sheets."""


def prepare_target(config: Config, target: str) -> tuple[Config, list[Any]]:
    """The devices that `target` names, and the config as it stands on them. devices: those that
    the config finds or simulates here; cpu: as many simulated ones as the config is meant for; else
    a TPU topology such as v5e:4x4, which needs no TPU. Raises ValueError.
    """
    topology = target not in ("devices", "cpu")
    if topology:
        if find_spec("libtpu") is None:
            raise ValueError(f"--target {target} needs TPU's compiler; install the extra tpu")
        for name, value in WITHOUT_TPU.items():
            os.environ.setdefault(name, value)
    import jax

    from ..runtime.devices import prepare_devices

    if topology:
        cache = config.device.compile_cache
        prepare_devices(Config(device=DeviceConfig(platform="cpu", compile_cache=cache)))
        devices = topology_devices(target)
        there = "device.platform=null", "device.cpu_devices=null", f"device.count={len(devices)}"
        return override(config, *ALONE, *there), devices
    if target == "cpu":
        config = on_simulated_devices(config)
    config = override(config, *ALONE)
    prepare_devices(config)
    return config, jax.devices()


def on_simulated_devices(config: Config) -> Config:
    """`config` with as many simulated CPU devices as it is meant for. Raises ConfigError where it
    does not say.
    """
    sizes, stated = config.mesh.sizes(), config.stated_devices()
    open_axis = next((axis for axis, size in sizes.items() if size == -1), None)
    if open_axis and not stated:
        raise ConfigError(
            f"mesh.{open_axis}=-1: plan needs the number of devices; write device.count=N"
        )
    count = math.prod(stated.values() if stated else sizes.values())
    simulated = "device.platform=cpu", f"device.cpu_devices={count}", f"device.count={count}"
    return override(config, *simulated)


def topology_devices(name: str) -> list[Any]:
    """The devices of a TPU topology, to compile for. Raises ValueError."""
    import jax
    from jax.experimental import topologies

    try:
        devices = list(topologies.get_topology_desc(name, platform="tpu").devices)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"--target {name}: {reason}; write devices, cpu or a TPU topology such as v5e:4x4"
        ) from None
    if any(device.core_on_chip for device in devices):
        raise ValueError(
            f"--target {name}: no mesh has chips of two devices; write v5e, v5p or v6e"
        )
    return devices


def device_memory(device: Any) -> int | None:
    """Bytes that a device has for a program; None where that is the host's or not known."""
    import jax

    if device.device_kind in MEMORY:
        return MEMORY[device.device_kind] * 2**30
    if device.platform == "cpu" or device not in jax.devices():
        return None
    return (device.memory_stats() or {}).get("bytes_limit")
