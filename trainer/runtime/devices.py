"""The process's devices and compilation cache, set from config sections `device` and `launch`
before JAX's backend starts, with the run's other processes.
"""

from __future__ import annotations

import jax

from ...sharding.keys import user_path
from ...sharding.mesh import simulate_devices
from ..config import Config
from .compile_cache import cache_folder
from .processes import check_counts, start_processes


def prepare_devices(config: Config) -> None:
    """Join the other processes, choose the platform, simulate CPU devices, switch the persistent
    compilation cache on. A second call with the same config does nothing.

    Raises ValueError with the config key where JAX has started differently already, finds no such
    platform, other processes and devices than stated, or is set up to compute other numbers;
    RuntimeError where it cannot join.
    """
    _check_settings()
    start_processes(config)
    device = config.device
    if device.compile_cache != "auto":
        cache = device.compile_cache and str(user_path(device.compile_cache))
        jax.config.update("jax_compilation_cache_dir", cache)
    elif not jax.config.values["jax_compilation_cache_dir"]:  # the user's own setting of JAX stays
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    if device.cpu_devices is not None:
        simulate_devices(device.cpu_devices)
    else:
        _choose_platform(device.platform)
    check_counts(config)


NEEDED = {
    "jax_enable_x64": False,  # all we count and compute has 32 bits
    "jax_disable_jit": False,
    "jax_numpy_dtype_promotion": "standard",
    # with others, initial parameters depend on the mesh
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
    "jax_random_seed_offset": 0,
}
"""Settings of JAX that a run cannot do without; all are its defaults."""


def _check_settings() -> None:
    for name, needed in NEEDED.items():
        found = getattr(jax.config, name)
        if found != needed:
            raise ValueError(
                f"{name}={found}: Meshwright needs {name}={needed}; unset the variable "
                f"{name.upper()}, or call jax.config.update({name!r}, {needed!r})"
            )


def _choose_platform(platform: str | None) -> None:
    if platform is not None:
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(platform, platform))
    try:
        found = jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # JAX 0.10 asserts that CUDA is there
        reason = str(error).partition("\n")[0] or "JAX finds no such device"
        raise ValueError(f"device.platform={platform}: {reason}") from None
    if platform not in (None, found):
        raise ValueError(f"device.platform={platform}: JAX has already started on {found}")
