"""Every test sees eight CPU devices and a strict JAX."""

import os
from importlib.metadata import version

# Tests compile far more than they run. Without LLVM's optimisations a step compiles twice as fast,
# and without MLIR's emitters, which jax 0.10 can still do without, three times as fast again.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 "
    + "--xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10."),
)

import jax
from hypothesis import settings

from meshwright.sharding.mesh import simulate_devices

simulate_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples in every run, so that a red test can be run again.
settings.register_profile("meshwright", deadline=None, derandomize=True, database=None)
settings.load_profile("meshwright")
