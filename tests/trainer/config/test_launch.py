"""What each scheduler's variables say of the processes it started."""

from __future__ import annotations

import pytest

from meshwright.trainer.config.launch import find_scheduler
from meshwright.trainer.config.load import ConfigError, load
from schedulers import (
    ALLOCATION,
    CHIPS,
    INDEXED,
    OPEN_MPI,
    ORTE,
    POD,
    SLICE,
    SLICES,
    SLURM,
    STEP,
    TPU,
)

EXPLICIT = {"coordinator": "host:1234", "process_id": 1, "process_count": 2}


@pytest.mark.parametrize(
    ("environ", "settings"),
    [
        ({}, {}),
        (ALLOCATION, {}),  # the shell of salloc
        (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, {}),  # salloc's interactive step
        (STEP | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}, {}),  # srun -n1
        (SLURM | {"SLURM_NTASKS": "1"}, {}),  # a batch script of one task
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NNODES": "1"}, {}),  # sbatch -N1
        (ORTE | {"OMPI_COMM_WORLD_SIZE": "1"}, {}),
        (ORTE | {"OMPI_COMM_WORLD_SIZE": "1"} | SLURM, {}),
        (POD, {}),  # a pod of no indexed job
        (TPU | {"TPU_WORKER_HOSTNAMES": "localhost"}, {}),
        (TPU, {"cpu_devices": 8}),  # simulated on a TPU's host
        (TPU, {"platform": "cpu"}),
        ({"TPU_SKIP_MDS_QUERY": "1"}, {}),  # libtpu without chips
        (CHIPS | {"TPU_SKIP_MDS_QUERY": "1"}, {}),
        *((environ, {"process_count": 1}) for environ in (SLURM, STEP, OPEN_MPI, INDEXED, TPU)),
        ({}, {"coordinator": "host:1234", "process_id": 0, "process_count": 1}),
    ],
)
def test_a_process_alone(start, environ, settings):
    assert start(environ, **settings) is None


@pytest.mark.parametrize(
    ("environ", "packages", "expected"),
    [
        (STEP, (), {"cluster_detection_method": "slurm", "num_processes": 4}),
        (
            STEP | {"SLURM_STEP_NUM_NODES": "4"},
            (),
            {"cluster_detection_method": "slurm", "num_processes": 4, "local_device_ids": []},
        ),
        (
            STEP | {"SLURM_STEP_NUM_NODES": "4", "JAX_LOCAL_DEVICE_IDS": "0"},
            (),
            {"cluster_detection_method": "slurm", "num_processes": 4},
        ),
        (ORTE, (), {"cluster_detection_method": "ompi", "num_processes": 4}),
        (ORTE | SLURM, (), {"cluster_detection_method": "ompi", "num_processes": 4}),
        (OPEN_MPI, ("mpi4py",), {"cluster_detection_method": "mpi4py", "num_processes": 4}),
        (
            INDEXED,
            ("kubernetes",),
            {"cluster_detection_method": "k8s", "num_processes": None},
        ),
        (TPU, (), {"cluster_detection_method": "gketpu", "num_processes": 2}),
        (SLICES | SLICE, (), {"cluster_detection_method": "gketpu", "num_processes": 6}),
        (CHIPS, (), {"cluster_detection_method": "gcetpu", "num_processes": None}),
    ],
)
def test_one_of_several_processes(start, environ, packages, expected):
    assert start(environ, packages) == expected
    assert start(environ, packages, process_count=expected["num_processes"] or 9) == expected


def test_explicit_keys_come_before_the_scheduler(start):
    assert start(STEP, **EXPLICIT, timeout=2.5) == {
        "cluster_detection_method": "deactivate",
        "coordinator_address": "host:1234",
        "num_processes": 2,
        "process_id": 1,
    }


@pytest.mark.parametrize(
    ("environ", "missing", "remedy"),
    [
        (SLURM, "one of 4 processes, but SLURM_STEP_NODELIST is missing", "start with srun"),
        (
            {name: STEP[name] for name in STEP if name != "SLURM_LOCALID"},
            "SLURM_LOCALID is missing",
            "start with srun",
        ),
        (
            {"SLURM_JOB_ID": "7", "SLURM_NNODES": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
            "one of 4 processes, but SLURM_NTASKS, SLURM_STEP_NODELIST is missing",
            "start with srun",
        ),
        (OPEN_MPI, "OMPI_MCA_orte_hnp_uri is missing", "install mpi4py"),
        (
            {name: ORTE[name] for name in ORTE if name != "OMPI_COMM_WORLD_RANK"},
            "OMPI_COMM_WORLD_RANK is missing",
            "launch.process_id",
        ),
        (INDEXED, "of several processes, but the Python package kubernetes is", "jax[k8s]"),
        (SLICES, "MEGASCALE_SLICE_ID, MEGASCALE_COORDINATOR_ADDRESS is missing", "variables"),
        (
            {"TPU_WORKER_HOSTNAMES": "a,b"},
            "TPU_WORKER_ID, libtpu with its chips is missing",
            "extra tpu",
        ),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "JAX_COORDINATOR_ADDRESS=a:1: ", "write launch"),
    ],
)
def test_half_set_variables_say_what_is_missing(start, environ, missing, remedy):
    """Case C24."""
    with pytest.raises(ValueError) as raised:
        start(environ)
    message = str(raised.value)
    assert message.startswith(find_scheduler(environ).name)
    assert missing in message and remedy in message and "\n" not in message
    assert message.endswith("or launch.process_count=1 to run this process alone")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (STEP, "launch.process_count=3, but SLURM started 4"),
        (ORTE | {"OMPI_COMM_WORLD_SIZE": "1"}, "launch.process_count=3, but Open MPI started 1"),
        ({}, "launch.process_count=3, but no scheduler started this process; write launch.coord"),
    ],
)
def test_a_stated_count_that_is_not_the_scheduler_s(start, environ, message):
    with pytest.raises(ValueError, match=message):
        start(environ, process_count=3)


EIGHT = ("mesh.data=1", "mesh.fsdp=8", "mesh.tensor=1", "device.cpu_devices=4")


def test_simulated_devices_are_counted_over_the_processes_that_a_scheduler_starts(monkeypatch):
    """Two processes of four devices hold a mesh of eight, and nothing but SLURM says so."""
    with pytest.raises(ConfigError, match="needs 8 devices, but there are 4"):
        load("tiny", *EIGHT)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    assert load("tiny", *EIGHT).stated_devices() == {}
    with pytest.raises(ConfigError, match="needs 8 devices, but there are 12"):
        load("tiny", *EIGHT, "launch.process_count=3")
    with pytest.raises(ConfigError, match="needs 8 devices, but there are 4"):
        load("tiny", *EIGHT, "launch.process_count=1")
