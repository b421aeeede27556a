"""The config of a run, section by section. No JAX here."""

from .checkpoint import CheckpointConfig
from .data import SMALLEST_VOCABULARY, DataConfig
from .device import DeviceConfig, LogConfig
from .launch import LaunchConfig
from .optimizer import BF16_STEP, GroupConfig, OptimizerConfig, RuleSettings
from .precision import PrecisionConfig
from .run import AUTO, RunConfig, TrainConfig
from .tree import Config

__all__ = [
    "AUTO",
    "BF16_STEP",
    "SMALLEST_VOCABULARY",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DeviceConfig",
    "GroupConfig",
    "LaunchConfig",
    "LogConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "RuleSettings",
    "RunConfig",
    "TrainConfig",
]
