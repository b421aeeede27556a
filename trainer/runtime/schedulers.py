"""How a scheduler started this process: its environment, read as JAX reads it. No JAX here.

SLURM, Open MPI, Kubernetes and TPU slices set variables; where some are there and others are
missing JAX would start this process alone, or wait for ever, so that is an error here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

from ..config import DeviceConfig

EXPLICIT = "device.coordinator=HOST:PORT device.process_id=… device.process_count=…"


@dataclass(frozen=True)
class Launch:
    """How a scheduler started this process, read from the environment as JAX reads it.

    method: JAX's name of the scheduler. count: processes; None where only a service knows. missing:
    what JAX needs and does not find. remedy: how to come by it. one_per_host: this process is the
    only one on its host.
    """

    scheduler: str
    method: str
    count: int | None
    missing: tuple[str, ...] = ()
    remedy: str = ""
    one_per_host: bool = False


def find_launch(environ: Mapping[str, str], on_tpu: bool = True) -> Launch | None:
    """The scheduler that started this process, looked for in JAX's order; None: no scheduler did.

    on_tpu: whether the run may be on the TPU, whose host is part of its slice whoever starts what.
    """
    launch = _open_mpi(environ) or _slurm(environ)
    launch = launch or (on_tpu and _tpu(environ)) or _kubernetes(environ)
    if not launch and (address := environ.get("JAX_COORDINATOR_ADDRESS")):
        missing = ("the processes' number and count",)
        return Launch(f"JAX_COORDINATOR_ADDRESS={address}", "deactivate", None, missing)
    return launch or None


def _missing(environ: Mapping[str, str], *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if not environ.get(name))


def _open_mpi(environ: Mapping[str, str]) -> Launch | None:
    """mpirun of Open MPI; version 5 says nothing of its address, so MPI itself must be asked."""
    if not (size := environ.get("OMPI_COMM_WORLD_SIZE")):
        return None
    missing = _missing(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    by_uri = bool(environ.get("OMPI_MCA_orte_hnp_uri"))
    if not by_uri and importlib.util.find_spec("mpi4py") is None:
        missing = (*missing, "OMPI_MCA_orte_hnp_uri")
    return Launch(
        "Open MPI",
        "ompi" if by_uri else "mpi4py",
        int(size),
        missing,
        "install mpi4py",
        environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1",
    )


def _slurm(environ: Mapping[str, str]) -> Launch | None:
    """A task of srun, or the batch script that should have called it."""
    task = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST")
    if len(_missing(environ, *task)) == len(task):
        return None  # no task: the shell of salloc
    nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    # the step's own count comes first: an interactive step has one task in a larger allocation
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or nodes
    missing = _missing(environ, "SLURM_JOB_ID", "SLURM_NTASKS", *task)
    return Launch("SLURM", "slurm", int(tasks), missing, "start with srun", tasks == nodes)


def _tpu(environ: Mapping[str, str]) -> Launch | None:
    """A host of a TPU slice, from GKE's variables or, on a TPU VM, the metadata service."""
    # JAX sets the first where it finds libtpu and chips, the second where it finds no chips
    has_chips = bool(environ.get("TPU_ML_PLATFORM"))
    hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES")
    if not hosts:
        asks_metadata = has_chips and not environ.get("TPU_SKIP_MDS_QUERY")
        return Launch("TPU VM metadata", "gcetpu", None) if asks_metadata else None
    slices = int(environ.get("MEGASCALE_NUM_SLICES") or 1)
    multislice = ("MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS") if slices > 1 else ()
    missing = _missing(environ, "TPU_WORKER_ID", *multislice)
    if not has_chips:
        missing = (*missing, "libtpu with its chips")
    remedy = "install the extra tpu, set the variables"
    return Launch("TPU", "gketpu", len(hosts.split(",")) * slices, missing, remedy)


def _kubernetes(environ: Mapping[str, str]) -> Launch | None:
    """A pod of an indexed Job; any other pod is a process like others."""
    if _missing(environ, "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"):
        return None
    missing = () if importlib.util.find_spec("kubernetes") else ("the Python package kubernetes",)
    return Launch("Kubernetes", "k8s", None, missing, "install jax[k8s]")


def complete_launch(config: DeviceConfig, environ: Mapping[str, str]) -> Launch | None:
    """The launch of one process of several; None: this process is alone."""
    launch = find_launch(environ, on_tpu=config.platform != "cpu" and config.cpu_devices is None)
    stated = config.process_count
    if launch is None:
        if stated is not None:
            raise ValueError(
                f"device.process_count={stated}, but no scheduler started this process; write "
                f"device.coordinator=HOST:PORT and device.process_id=… as well"
            )
        return None
    if None not in (stated, launch.count) and stated != launch.count:
        raise ValueError(
            f"device.process_count={stated}, but {launch.scheduler} started {launch.count}"
        )
    if launch.count == 1:
        return None
    if launch.missing:
        several = f"of {launch.count} processes" if launch.count else "of several processes"
        remedy = f"{launch.remedy}, or write" if launch.remedy else "write"
        raise ValueError(
            f"{launch.scheduler}: this looks like one {several}, but {', '.join(launch.missing)} "
            f"is missing; {remedy} {EXPLICIT}, or device.process_count=1 to run this process alone"
        )
    return launch
