"""Config sections `model` and `remat`. No JAX here."""

from .mla import MlaConfig
from .model import LayerConfig, ModelConfig, SegmentConfig
from .moe import MoeConfig
from .remat import CORE, ROUTE, RematConfig, Saved
from .rope import RopeScalingConfig

__all__ = [
    "CORE",
    "ROUTE",
    "LayerConfig",
    "MlaConfig",
    "ModelConfig",
    "MoeConfig",
    "RematConfig",
    "RopeScalingConfig",
    "Saved",
    "SegmentConfig",
]
