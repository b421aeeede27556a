"""Config section `launch`: the run's processes; and what a scheduler's environment says where the
section says nothing, read as JAX reads it. No JAX here.

SLURM, Open MPI, Kubernetes and TPU slices set variables; where some are there and others are
missing JAX would start this process alone, or wait for ever, so that is an error here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass as plain_dataclass
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from ...sharding.keys import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LaunchConfig:
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
    timeout: Annotated[
        float,
        Field(
            gt=0,
            description="seconds until a process that waits for another in vain ends with an error",
        ),
    ] = 300.0

    def __post_init__(self) -> None:
        explicit = {
            "launch.coordinator": self.coordinator,
            "launch.process_id": self.process_id,
            "launch.process_count": self.process_count,
        }
        given = {key for key, value in explicit.items() if value is not None}
        if given - {"launch.process_count"} and len(given) < len(explicit):
            written = ", ".join(f"{key}={explicit[key]}" for key in explicit if key in given)
            missing = " and ".join(key for key in explicit if key not in given)
            raise ValueError(f"{written}: {missing} is missing; write all three, or none")
        if (
            self.process_id is not None
            and self.process_count is not None
            and self.process_id >= self.process_count
        ):
            raise ValueError(
                f"launch.process_id={self.process_id} is not below "
                f"launch.process_count={self.process_count}"
            )


EXPLICIT = "launch.coordinator=HOST:PORT launch.process_id=… launch.process_count=…"


@plain_dataclass(frozen=True)
class Scheduler:
    """How a scheduler started this process."""

    name: str
    """as messages call it"""
    method: str
    """JAX's name of it"""
    count: int | None
    """processes; None where only a service knows"""
    missing: tuple[str, ...] = ()
    """what JAX needs and does not find"""
    remedy: str = ""
    """how to come by that"""
    one_per_host: bool = False
    """whether this process is the only one on its host"""


def find_scheduler(environ: Mapping[str, str], on_tpu: bool = True) -> Scheduler | None:
    """The scheduler that started this process, looked for in JAX's order; None: no scheduler did.

    on_tpu: whether the run may be on the TPU, whose host is part of its slice whoever starts what.
    """
    launch = _open_mpi(environ) or _slurm(environ)
    launch = launch or (on_tpu and _tpu(environ)) or _kubernetes(environ)
    if not launch and (address := environ.get("JAX_COORDINATOR_ADDRESS")):
        missing = ("the processes' number and count",)
        return Scheduler(f"JAX_COORDINATOR_ADDRESS={address}", "deactivate", None, missing)
    return launch or None


def _missing(environ: Mapping[str, str], *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if not environ.get(name))


def _open_mpi(environ: Mapping[str, str]) -> Scheduler | None:
    """mpirun of Open MPI; version 5 says nothing of its address, so MPI itself must be asked."""
    if not (size := environ.get("OMPI_COMM_WORLD_SIZE")):
        return None
    missing = _missing(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    by_uri = bool(environ.get("OMPI_MCA_orte_hnp_uri"))
    if not by_uri and importlib.util.find_spec("mpi4py") is None:
        missing = (*missing, "OMPI_MCA_orte_hnp_uri")
    return Scheduler(
        "Open MPI",
        "ompi" if by_uri else "mpi4py",
        int(size),
        missing,
        "install mpi4py",
        environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1",
    )


def _slurm(environ: Mapping[str, str]) -> Scheduler | None:
    """A task of srun, or the batch script that should have called it."""
    task = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST")
    if len(_missing(environ, *task)) == len(task):
        return None  # no task: the shell of salloc
    nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    # the step's own count comes first: an interactive step has one task in a larger allocation
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or nodes
    missing = _missing(environ, "SLURM_JOB_ID", "SLURM_NTASKS", *task)
    return Scheduler("SLURM", "slurm", int(tasks), missing, "start with srun", tasks == nodes)


def _tpu(environ: Mapping[str, str]) -> Scheduler | None:
    """A host of a TPU slice, from GKE's variables or, on a TPU VM, the metadata service."""
    # JAX sets the first where it finds libtpu and chips, the second where it finds no chips
    has_chips = bool(environ.get("TPU_ML_PLATFORM"))
    hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES")
    if not hosts:
        asks_metadata = has_chips and not environ.get("TPU_SKIP_MDS_QUERY")
        return Scheduler("TPU VM metadata", "gcetpu", None) if asks_metadata else None
    slices = int(environ.get("MEGASCALE_NUM_SLICES") or 1)
    multislice = ("MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS") if slices > 1 else ()
    missing = _missing(environ, "TPU_WORKER_ID", *multislice)
    if not has_chips:
        missing = (*missing, "libtpu with its chips")
    remedy = "install the extra tpu, set the variables"
    return Scheduler("TPU", "gketpu", len(hosts.split(",")) * slices, missing, remedy)


def _kubernetes(environ: Mapping[str, str]) -> Scheduler | None:
    """A pod of an indexed Job; any other pod is a process like others."""
    if _missing(environ, "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"):
        return None
    missing = () if importlib.util.find_spec("kubernetes") else ("the Python package kubernetes",)
    return Scheduler("Kubernetes", "k8s", None, missing, "install jax[k8s]")


def scheduler_of(
    config: LaunchConfig, on_tpu: bool, environ: Mapping[str, str]
) -> Scheduler | None:
    """The scheduler of one process of several; None: this process is alone. Raises ValueError where
    config and environment do not say enough, or not the same.
    """
    scheduler, stated = find_scheduler(environ, on_tpu), config.process_count
    if scheduler is None:
        if stated is not None:
            raise ValueError(
                f"launch.process_count={stated}, but no scheduler started this process; write "
                f"launch.coordinator=HOST:PORT and launch.process_id=… as well"
            )
        return None
    if None not in (stated, scheduler.count) and stated != scheduler.count:
        raise ValueError(
            f"launch.process_count={stated}, but {scheduler.name} started {scheduler.count}"
        )
    if scheduler.count == 1:
        return None
    if scheduler.missing:
        several = f"of {scheduler.count} processes" if scheduler.count else "of several processes"
        remedy = f"{scheduler.remedy}, or write" if scheduler.remedy else "write"
        raise ValueError(
            f"{scheduler.name}: this looks like one {several}, but {', '.join(scheduler.missing)} "
            f"is missing; {remedy} {EXPLICIT}, or launch.process_count=1 to run this process alone"
        )
    return scheduler
