"""Every test sees eight CPU devices and a strict JAX."""

import gc
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
import pytest
from hypothesis import settings

from meshwright.sharding.mesh import simulate_devices
from meshwright.trainer import state
from runs import AS_SHIPPED

# Tracing makes objects by the hundred thousand that JAX's caches keep: fewer looks at them save a
# twentieth of all CPU time.
gc.freeze()
gc.set_threshold(20_000, 20, 50)

simulate_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples in every run, so that a red test can be run again.
settings.register_profile("meshwright", deadline=None, derandomize=True, database=None)
settings.load_profile("meshwright")


@pytest.fixture(scope="module")
def shipped_init():
    """Initial parameters compiled as users' are: their bits are compared."""

    def run_once(make, shardings):
        return jax.jit(make, out_shardings=shardings, compiler_options=AS_SHIPPED)()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "_run_once", run_once)
        yield
