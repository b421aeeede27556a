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
    from .trainer.load import load
    from .trainer.loop import train
    from .trainer.verify import verify

__all__ = ["Config", "load", "simulate_devices", "train", "verify"]

_HOMES = {
    "Config": ".trainer.config",
    "load": ".trainer.load",
    "simulate_devices": ".sharding.mesh",
    "train": ".trainer.loop",
    "verify": ".trainer.verify",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import meshwright` brings no JAX and starts no backend."""
    if name == "__version__":
        return version("meshwright")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
