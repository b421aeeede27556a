"""Meshwright trains language models with JAX on any device mesh.

import meshwright as mw
config = mw.load("tiny", "mesh.tensor=2")
result = mw.train(config)
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sharding.mesh import simulate_devices
    from .trainer.config import Config
    from .trainer.config.load import load
    from .trainer.generate import generate_run as generate
    from .trainer.inspect.verify import verify
    from .trainer.loop import train

__all__ = ["Config", "generate", "load", "simulate_devices", "train", "verify"]

_HOMES = {
    "Config": ".trainer.config.Config",
    "generate": ".trainer.generate.generate_run",
    "load": ".trainer.config.load.load",
    "simulate_devices": ".sharding.mesh.simulate_devices",
    "train": ".trainer.loop.train",
    "verify": ".trainer.inspect.verify.verify",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import meshwright` brings no JAX and starts no backend."""
    if name == "__version__":
        return version("meshwright")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES[name].rpartition(".")
    return getattr(import_module(module, __name__), attribute)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
