"""Several processes: what starts them, what they agree on, and how they end when one is stuck or
dead.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap

import jax
import pytest

from meshwright.trainer.config import Config, LaunchConfig
from meshwright.trainer.runtime.processes import start_processes
from processes import free_port, run_processes
from schedulers import (
    STEP,
    TPU,
)


def test_an_error_of_jax_is_one_line_with_the_way_out(start, monkeypatch):
    def refuse(**options):
        raise RuntimeError("Kubernetes API Error: 403\n  ask for the permission")

    start({})
    monkeypatch.setattr(jax.distributed, "initialize", refuse)
    with pytest.raises(RuntimeError) as raised:
        start_processes(Config(), TPU)
    assert str(raised.value) == (
        "TPU: JAX cannot join the processes: Kubernetes API Error: 403 ask for the permission; "
        "write launch.coordinator=HOST:PORT launch.process_id=… launch.process_count=…, or "
        "launch.process_count=1 to run this process alone"
    )


def test_importing_everything_starts_no_backend_under_slurm():
    """Case C24. Nor does it join any process: what SLURM says is read when a run starts."""
    code = """
    import importlib, pkgutil, sys
    import meshwright, jax
    for package in ("sharding", "models", "trainer"):
        package = importlib.import_module(f"meshwright.{package}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    assert not jax.distributed.is_initialized()
    jax.distributed.initialize(sys.argv[1], 1, 0)  # JAX refuses it when a backend is up
    """
    command = [sys.executable, "-c", textwrap.dedent(code), f"127.0.0.1:{free_port()}"]
    subprocess.run(command, env=os.environ | STEP | {"JAX_PLATFORMS": "cpu"}, check=True)


def test_a_taken_port_is_named():
    with socket.create_server(("", 0)) as taken:
        coordinator = f"127.0.0.1:{taken.getsockname()[1]}"
        launch = LaunchConfig(coordinator=coordinator, process_id=0, process_count=2)
        with pytest.raises(ValueError, match=f"launch.coordinator={coordinator}: the port: .*use"):
            start_processes(Config(launch=launch), {})


@pytest.mark.parametrize("number", [0, 1])
def test_a_process_whose_others_never_start_says_so(number):
    code = """
    import sys
    from meshwright.trainer.config import Config, LaunchConfig
    from meshwright.trainer.runtime.processes import start_processes
    start_processes(Config(launch=LaunchConfig(
        coordinator=sys.argv[1], process_id=int(sys.argv[2]), process_count=2, timeout=1)))
    """
    coordinator = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-c", textwrap.dedent(code), coordinator, str(number)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"meshwright: waited launch.timeout=1 s for all 2 processes at {coordinator}; "
        "are they started?"
    )


def test_two_processes_agree():
    """And SIGTERM is ours, and Orbax saves without JAX's preemption service."""
    code = """
    import json, tempfile
    from dataclasses import replace
    from meshwright.sharding.config import MeshConfig
    from meshwright.sharding.mesh import make_mesh
    import orbax.checkpoint as ocp

    prepare_devices(config)  # again, as the command line and `train` both do
    number, said = jax.process_index(), []
    say = lambda *values: print(json.dumps(values), flush=True)

    say(jax.process_count(), jax.device_count(), is_first(), number)
    for changed in (
        replace(config, launch=replace(launch, process_count=3)),
        replace(config, device=replace(device, count=5)),
    ):
        try:
            prepare_devices(changed)
        except ValueError as error:
            say(str(error))

    say(on_first(lambda: {"number": number, "text": "ü" * 700}))
    def fail(kind):
        raise kind("the folder", "is gone") if kind is OSError else kind("this is why")
    for kind in (ValueError, OSError, RuntimeError, FileNotFoundError, KeyError):
        try:
            on_first(lambda: fail(kind))
        except Exception as error:
            say(type(error).__name__, str(error))
    say(any_process(number == 1), any_process(False))

    agree = make_agree(make_mesh(MeshConfig(data=2, tensor=2)))
    answers = [agree(flag) for flag in (False, number == 1, number == 0, True, False)]
    say(*(bool(answer) for answer in answers))

    signal.signal(signal.SIGTERM, lambda *_: said.append("ours"))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    folder = on_first(tempfile.mkdtemp)
    spread = jax.sharding.NamedSharding(make_mesh(MeshConfig(data=4)), jax.P("data"))
    rows = np.arange(8)
    value = {"rows": jax.make_array_from_callback((8,), spread, lambda index: rows[index])}
    with ocp.CheckpointManager(folder) as manager:
        manager.save(3, args=ocp.args.StandardSave(value))
        manager.wait_until_finished()
        say(said, manager.all_steps())

    with watch(60) as phase:
        phase("ending together")
    """
    first, second = run_processes(code)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    first, second = (list(map(json.loads, one.printed)) for one in (first, second))
    told = [["FileNotFoundError", "this is why"], ["KeyError", "'this is why'"]]
    heard = [["OSError", "this is why"], ["RuntimeError", "process 0: KeyError: 'this is why'"]]
    for lines, number, others in ((first, 0, told), (second, 1, heard)):
        assert lines == [
            [2, 4, number == 0, number],
            ["launch.process_count=3, but JAX runs in 2 process(es)"],
            ["device.count=5, but JAX finds 4 device(s) in 2 process(es)"],
            [{"number": 0, "text": "ü" * 700}],
            ["ValueError", "this is why"],
            ["OSError", "[Errno the folder] is gone"],
            ["RuntimeError", "this is why"],
            *others,
            [True, False],
            [False, True, True, True, False],
            [["ours"], [3]],
        ]


def test_an_error_of_all_ends_all_with_its_code_at_once():
    code = """
    try:
        on_first(lambda: int("x"))
    except ValueError as error:
        print(error, flush=True)
        end_processes(0)
        end_processes(2)
    """
    ended = run_processes(code)
    for process in ended:
        assert process.returncode == 2, process.stderr
        assert process.printed == ["invalid literal for int() with base 10: 'x'"]
        assert not process.said and "Terminating" not in process.stderr


def test_processes_that_agreed_to_stop_end_together_whatever_their_threads_do():
    code = """
    import threading
    threading.Thread(target=time.sleep, args=[100]).start()
    end_processes(75)
    """
    for process in run_processes(code):
        assert process.returncode == 75, process.stderr
        assert process.seconds < 60


STEPS = """
from meshwright.sharding.config import MeshConfig
from meshwright.sharding.mesh import make_mesh

agree = make_agree(make_mesh(MeshConfig(data=jax.device_count())))
number, victim, misfortune = jax.process_index(), VICTIM, "MISFORTUNE"
try:
    with watch(launch.timeout) as phase:
        for step in range(8):
            phase(f"reading the batch of step {step}")
            time.sleep(0.1)
            if step == 5 and number == victim:
                if misfortune == "stuck":
                    time.sleep(1000)
                if misfortune == "FAIL":
                    raise RuntimeError("the disk is full")
                os.kill(os.getpid(), getattr(signal, misfortune))
            phase(f"in step {step}")
            bool(agree(False))
except RuntimeError as error:
    print(f"meshwright: {error}", file=sys.stderr, flush=True)
    end_processes(1)
"""


def run_steps(victim: int, misfortune: str, **options):
    code = STEPS.replace("VICTIM", str(victim)).replace("MISFORTUNE", misfortune)
    return run_processes(code, timeout=2, **options)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stuck_process_and_those_that_wait_for_it_say_so(victim):
    """Case C23."""
    ended = run_steps(victim, "stuck")
    for number, process in enumerate(ended):
        assert process.returncode == 1, process.stderr
        (doing,) = process.said  # all answer: each has spoken
        what = "reading the batch of step 5" if number == victim else "in step 5"
        start = f"meshwright: process {number} of 2: no progress for "
        assert doing.startswith(start) and doing.endswith(f" s, launch.timeout=2: {what}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("misfortune", "devices"), [("SIGKILL", 1), ("SIGKILL", 2), ("SIGSTOP", 2)]
)
def test_a_process_without_another_names_it(misfortune, devices):
    """With one device each Gloo sees that a peer is gone; with several it waits for ever."""
    stopped = [1] if misfortune == "SIGSTOP" else []
    survivor, victim = run_steps(1, misfortune, devices=devices, stopped=stopped)
    assert (survivor.returncode, victim.returncode) == (1, -signal.SIGKILL), survivor.stderr
    assert "process 1 of 2" in survivor.said[-1]
    assert "in step 5" in "".join(survivor.said)
    assert survivor.seconds < 60


def test_a_process_that_fails_alone_ends_the_others():
    survivor, victim = run_steps(1, "FAIL")
    assert (survivor.returncode, victim.returncode) == (1, 1), survivor.stderr + victim.stderr
    assert victim.said == ["meshwright: the disk is full"]
    assert survivor.said[0].endswith(": in step 5")


@pytest.mark.slow
def test_a_process_without_the_coordinator_ends():
    """JAX itself aborts it where process 0 is dead; where it is stopped, it is named."""
    victim, survivor = run_steps(0, "SIGSTOP", stopped=[0])
    assert survivor.returncode == 1, survivor.stderr
    assert survivor.said[-1] == "meshwright: process 1 of 2: no answer from process 0 of 2"
    victim, survivor = run_steps(0, "SIGKILL")
    assert survivor.returncode in (1, -signal.SIGABRT)
    assert "leader task" in survivor.stderr or "process 0 of 2" in survivor.said[-1]
    assert survivor.seconds < 60
