"""Every test sees eight CPU devices and a strict JAX."""

import jax
from hypothesis import settings

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples in every run, so that a red test can be run again.
settings.register_profile("meshwright", deadline=None, derandomize=True, database=None)
settings.load_profile("meshwright")
