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
    coordinator: Annotated[
        str | None,
        Field(
            pattern=r":\d+$",
            description="host:port of process 0; null: from the scheduler's environment, if any",
        ),
    ] = None
    process_id: Annotated[
        int | None, Field(ge=0, description="this process's number; null: from the scheduler")
    ] = None
    process_count: Annotated[
        int | None,
        Field(
            gt=0,
            description="processes expected; null: as many as the scheduler says; 1: just this "
            "one, whatever the scheduler says",
        ),
    ] = None
    count: Annotated[
        int | None, Field(gt=0, description="devices expected over all processes; null: any")
    ] = None
    timeout: Annotated[
        float,
        Field(
            gt=0,
            description="seconds until a process that waits for another in vain ends with an error",
        ),
    ] = 300.0
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
        explicit = {
            "device.coordinator": self.coordinator,
            "device.process_id": self.process_id,
            "device.process_count": self.process_count,
        }
        given = {key for key, value in explicit.items() if value is not None}
        if given - {"device.process_count"} and len(given) < len(explicit):
            written = ", ".join(f"{key}={explicit[key]}" for key in explicit if key in given)
            missing = " and ".join(key for key in explicit if key not in given)
            raise ValueError(f"{written}: {missing} is missing; write all three, or none")
        if (
            self.process_id is not None
            and self.process_count is not None
            and self.process_id >= self.process_count
        ):
            raise ValueError(
                f"device.process_id={self.process_id} is not below "
                f"device.process_count={self.process_count}"
            )

    def stated_devices(self) -> dict[str, int]:
        """Config keys whose product is the number of devices over all processes; none: unknown."""
        if self.count is not None:
            return {"device.count": self.count}
        if self.cpu_devices is None:
            return {}
        processes = self.process_count or 1
        stated = {"device.cpu_devices": self.cpu_devices}
        return stated | ({"device.process_count": processes} if processes > 1 else {})
