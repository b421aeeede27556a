"""Config sections `device` and `log`. No JAX here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from ...sharding.keys import STRICT, LocalPath


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LogConfig:
    every: Annotated[int, Field(gt=0, description="updates between plain console lines")] = 10
    sample: Annotated[
        str | None,
        Field(min_length=1, description="prompt that a finished run continues; null: none"),
    ] = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DeviceConfig:
    platform: Annotated[
        Literal["cpu", "gpu", "tpu"] | None, Field(description="accelerator; null: what JAX finds")
    ] = None
    cpu_devices: Annotated[
        int | None,
        Field(
            gt=0,
            description="simulate this many devices on each process's CPU; null: do not simulate",
        ),
    ] = None
    count: Annotated[
        int | None, Field(gt=0, description="devices expected over all processes; null: any")
    ] = None
    compile_cache: Annotated[
        LocalPath | None,
        Field(
            description="folder of XLA's persistent cache; 'auto': the user's cache folder; "
            "null: off"
        ),
    ] = "auto"
    peak_flops: Annotated[
        float | None,
        Field(gt=0, description="peak FLOP/s of one device for MFU; null: by device kind"),
    ] = None

    def __post_init__(self) -> None:
        if self.cpu_devices is not None and self.platform not in (None, "cpu"):
            raise ValueError(
                f"device.cpu_devices={self.cpu_devices} simulates CPU devices, but device.platform="
                f"{self.platform}; write device.cpu_devices=null or device.platform=cpu"
            )
