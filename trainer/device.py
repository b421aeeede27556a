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
    if config.compile_cache != "auto":
        jax.config.update("jax_compilation_cache_dir", config.compile_cache)
    elif not jax.config.values["jax_compilation_cache_dir"]:  # the user's own setting of JAX stays
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    if config.cpu_devices is not None:
        simulate_devices(config.cpu_devices)
        return
    if config.platform is not None:
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(config.platform, config.platform))
    try:
        found = jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # JAX 0.10 asserts that CUDA is there
        reason = str(error).partition("\n")[0] or "JAX finds no such device"
        raise ValueError(f"device.platform={config.platform}: {reason}") from None
    if config.platform not in (None, found):
        raise ValueError(f"device.platform={config.platform}: JAX has already started on {found}")
