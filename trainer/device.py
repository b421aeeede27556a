"""The process's devices and compilation cache, set from config section `device` before JAX's
backend starts.
"""

from __future__ import annotations

import jax

from ..sharding.mesh import simulate_devices
from .cache import cache_folder
from .config import DeviceConfig


def prepare_devices(config: DeviceConfig) -> None:
    """Choose the platform, simulate CPU devices, switch the persistent compilation cache on.

    Raises ValueError with the config key where JAX has started differently already or finds no such
    platform.
    """
    if config.compile_cache is not None:
        folder = (
            str(cache_folder() / "xla") if config.compile_cache == "auto" else config.compile_cache
        )
        jax.config.update("jax_compilation_cache_dir", folder)
    if config.cpu_devices is not None:
        simulate_devices(config.cpu_devices)
        return
    if config.platform is not None:
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(config.platform, config.platform))
    try:
        found = jax.default_backend()
    except RuntimeError as error:
        raise ValueError(
            f"device.platform={config.platform}: {str(error).splitlines()[0]}"
        ) from None
    if config.platform not in (None, found):
        raise ValueError(f"device.platform={config.platform}: JAX has already started on {found}")
