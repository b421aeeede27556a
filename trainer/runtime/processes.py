"""Several processes as one run: how they start, agree, notice that one hangs or is gone, and end.

JAX's devices do the talking where the answer may wait for the devices; its coordination service,
which lives in process 0, does where a process may be stuck. With one process every function here
does nothing, or what its argument does.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...sharding.rules import without_devices
from ..config import Config
from ..config.differences import flat
from ..config.launch import EXPLICIT, scheduler_of
from ..config.load import show
from .stop import leave

T = TypeVar("T")

ROLL_CALL = 10.0
"""Seconds in which a living process answers."""

WITHOUT_A_WORD = 10.0
"""Seconds of waiting for the other processes until this one says so."""

LAST_RESORT = 60
"""Seconds after launch.timeout until JAX itself aborts a process, in its own words."""

SHARED_ERRORS = (ValueError, OSError, RuntimeError)
"""Built-in errors of process 0 that every process raises, for the same exit code."""


def start_processes(config: Config, environ: Mapping[str, str] = os.environ) -> None:
    """Join the run's other processes, from the config or the scheduler's environment; do nothing
    where there are none, or this process has joined already. Comes before JAX's backend starts.

    Waits launch.timeout seconds for the others, then says so and ends the process: JAX waits in
    C++, where its own timeout aborts. Raises ValueError where config and environment do not say
    enough, or not the same; RuntimeError where JAX fails to join.
    """
    launch, device = config.launch, config.device
    if launch.process_count == 1 or jax.distributed.is_initialized():
        return
    if launch.coordinator is not None:
        where, count = launch.coordinator, launch.process_count
        if launch.process_id == 0:
            _check_port(launch.coordinator)
        options: dict[str, Any] = {
            "coordinator_address": launch.coordinator,
            "num_processes": launch.process_count,
            "process_id": launch.process_id,
            "cluster_detection_method": "deactivate",
        }
    else:
        on_tpu = device.platform != "cpu" and device.cpu_devices is None
        scheduler = scheduler_of(launch, on_tpu, environ)
        if scheduler is None:
            return
        where, count = scheduler.name, scheduler.count
        options = {"cluster_detection_method": scheduler.method, "num_processes": scheduler.count}
        if scheduler.one_per_host and not environ.get("JAX_LOCAL_DEVICE_IDS"):
            # JAX would use one GPU for each process, and leave the host's others idle
            options["local_device_ids"] = []

    # SIGTERM stays ours: JAX's preemption service would swallow it
    jax.config.update("jax_enable_preemption_service", False)
    end = int(launch.timeout) + LAST_RESORT
    waits = f"waiting for {'the other' if count is None else f'all {count}'} processes at {where}"
    timers = (
        threading.Timer(WITHOUT_A_WORD, _say, [waits]),
        threading.Timer(launch.timeout, _give_up, [launch.timeout, count, where]),
    )
    for timer in timers:
        timer.daemon = True
        timer.start()
    interrupt = None
    if threading.current_thread() is threading.main_thread():
        # JAX waits in C++, where Python's handler would never run
        interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        jax.distributed.initialize(
            **options,
            initialization_timeout=end,
            heartbeat_timeout_seconds=end,
            shutdown_timeout_seconds=end,
        )
    except Exception as error:  # JAX asks services of many kinds, with errors of theirs
        reason = " ".join(str(error).split())
        raise RuntimeError(
            f"{where}: JAX cannot join the processes: {reason}; write {EXPLICIT}, or "
            f"launch.process_count=1 to run this process alone"
        ) from error
    finally:
        for timer in timers:
            timer.cancel()
        if interrupt is not None:
            signal.signal(signal.SIGINT, interrupt)


def _check_port(coordinator: str) -> None:
    """JAX crashes without a word where the port is taken."""
    try:
        socket.create_server(("", int(coordinator.rpartition(":")[2]))).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"launch.coordinator={coordinator}: the port: {error}") from None


def _give_up(timeout: float, count: int | None, where: str) -> None:
    others = "the other processes" if count is None else f"all {count} processes"
    _say(f"waited launch.timeout={timeout:g} s for {others} at {where}; are they started?")
    os._exit(1)


def check_counts(config: Config) -> None:
    """Raise ValueError, in all processes, where one has more devices than another, or the processes
    or devices found are not as many as one of them states.
    """
    processes, devices = jax.process_count(), jax.device_count()
    # every process can count for itself: what JAX sends between unequal ones fails
    held = Counter(device.process_index for device in jax.devices())
    if len(set(held.values())) > 1:
        found = _by_value({process: str(count) for process, count in held.items()})
        raise ValueError(
            f"every process needs as many devices as the others, but there are "
            f"{', '.join(f'{count} in {where}' for count, where in found.items())}; "
            f"write the same device.cpu_devices for all, or use hosts that are alike"
        )
    wrong = None
    count, stated = config.device.count, config.launch.process_count
    if stated not in (None, processes):
        wrong = f"launch.process_count={stated}, but JAX runs in {processes} process(es)"
    elif count not in (None, devices):
        few = processes == 1 and count > devices
        more = f"; {without_devices(count)}" if few else ""
        wrong = (
            f"device.count={count}, but JAX finds {devices} device(s) in {processes} "
            f"process(es){more}"
        )
    if any_process(wrong is not None):
        raise ValueError(
            wrong
            or "another process was started with another device.count or launch.process_count than "
            "is found; start all with the same command"
        )


OWN = (
    *("launch.process_id", "launch.coordinator", "device.compile_cache"),
    *("data.paths", "data.store"),  # what is read there is compared by its fingerprint
)
"""Keys that each process may have a value of its own for."""

NUMERICS = ("jax_default_matmul_precision", "jax_numpy_rank_promotion")
"""Settings of JAX that change numbers or errors."""


def check_same_config(config: Config, command: Mapping[str, Any] | None = None) -> None:
    """Raise ValueError in every process where the processes were started with different configs,
    commands, versions or settings of JAX: each would compile a program of its own, and they would
    wait for one another or add up what does not belong together. Comes before any compilation.

    command: what else the processes must have in common, by name, as JSON.
    """
    if jax.process_count() == 1:
        return
    settings = flat(asdict(config)) | dict(command or {})
    settings = {key: value for key, value in settings.items() if key not in OWN}
    settings |= {name: version(name) for name in ("meshwright", "jax", "jaxlib")}
    settings |= {name: jax.config.values[name] for name in NUMERICS}
    of_all = [json.loads(text) for text in _texts_of_all(json.dumps(settings))]
    keys = dict.fromkeys(key for each in of_all for key in each)
    lines = []
    for key in keys:
        values = {number: json.dumps(each.get(key)) for number, each in enumerate(of_all)}
        if len(found := _by_value(values)) > 1:
            shown = [f"{_shown(text, found)} in {where}" for text, where in found.items()]
            lines.append(f"{key}={', '.join(shown)}")
    if lines:
        raise ValueError(
            f"the processes were started differently: {'; '.join(lines)}; "
            f"start all with the same command"
        )


def _shown(text: str, others: Iterable[str]) -> str:
    """One of several values, written as JSON, for a message: a long one from a little before where
    it differs from the others.
    """
    if len(text) <= 60:
        return show(json.loads(text))
    same = len(os.path.commonprefix(list(others)))
    return f"…{text[max(same - 20, 0) : same + 40]}…"


def _by_value(values: Mapping[int, str]) -> dict[str, str]:
    """Process -> value as value -> `process 1` or `processes 0, 2 and 61 more`."""
    holders: dict[str, list[int]] = {}
    for process, value in sorted(values.items()):
        holders.setdefault(value, []).append(process)
    return {
        value: f"process{'es' if len(those) > 1 else ''} {', '.join(map(str, those[:4]))}"
        + (f" and {len(those) - 4} more" if len(those) > 4 else "")
        for value, those in holders.items()
    }


def is_first() -> bool:
    """Whether this process is the one that writes and prints. Never gate device work on it."""
    return jax.process_index() == 0


def on_first(action: Callable[[], T]) -> T:
    """What `action` gives in process 0, the only one to run it, in all processes. The result must
    be JSON; with one process it may be anything.

    Raises in every process what it raises: ValueError, OSError and RuntimeError as such, others as
    a RuntimeError (process 0: always the error itself).
    """
    if jax.process_count() == 1:
        return action()
    raised, answer = None, {}
    if is_first():
        try:
            answer = {"result": action()}
            json.dumps(answer)
        except BaseException as error:
            raised = error
            kind = next((kind for kind in SHARED_ERRORS if isinstance(error, kind)), None)
            text = str(error) if kind else f"process 0: {type(error).__name__}: {error}"
            answer = {"kind": (kind or RuntimeError).__name__, "text": text}
    answer = json.loads(_text_of_first(json.dumps(answer)))
    if raised is not None:
        raise raised
    if "kind" in answer:
        kinds = {kind.__name__: kind for kind in SHARED_ERRORS}
        raise kinds[answer["kind"]](answer["text"])
    return answer["result"]


def _text_of_first(text: str) -> str:
    """Process 0's text in all processes; what the others pass is ignored."""
    from jax.experimental.multihost_utils import broadcast_one_to_all
    from orbax.checkpoint.multihost import get_barrier_sync_fn

    # process 0 may work for hours before it comes here, longer than a collective waits
    get_barrier_sync_fn()(key="meshwright on_first", timeout_ms=30 * 24 * 3600 * 1000)
    data = np.frombuffer(text.encode(), np.uint8)
    size = int(broadcast_one_to_all(np.int32(data.size)))
    padded = np.zeros(-(-size // 1024) * 1024, np.uint8)  # few shapes: each is compiled
    if is_first():
        padded[:size] = data
    return bytes(broadcast_one_to_all(padded)[:size]).decode()


def _texts_of_all(text: str) -> list[str]:
    """Each process's text, in their order, in all processes."""
    from jax.experimental.multihost_utils import process_allgather

    data = np.frombuffer(text.encode(), np.uint8)
    sizes = np.ravel(process_allgather(np.int32(data.size)))
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: data.size] = data
    rows = np.asarray(process_allgather(padded))
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def any_process(flag: bool) -> bool:
    """Whether `flag` holds in any process. Waits for all processes, and for the devices."""
    from jax.experimental.multihost_utils import process_allgather

    if jax.process_count() == 1:
        return flag
    return bool(np.any(process_allgather(np.asarray(flag))))


def make_agree(mesh: Mesh) -> Callable[[bool], jax.Array | bool]:
    """A function that begins to ask whether `flag` holds in any process, and does not wait: the
    answer, true or false in all processes alike, is a device's i32 scalar like a step's metrics.

    flags[D_{all axes}] -> scalar, replicated: one all-reduce of four bytes. All processes must call
    it equally often, in the same order among their steps. With one process it returns `flag`.
    """
    if jax.process_count() == 1:
        return lambda flag: flag
    spread = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    no, yes = (
        jax.make_array_from_callback(
            (mesh.size,), spread, lambda _, value=value: np.full(1, value, np.int32)
        )
        for value in (0, 1)
    )
    largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
    largest = largest.lower(no).compile()
    return lambda flag: largest(yes if flag else no)


@contextmanager
def watch(timeout: float) -> Iterator[Callable[[str | None], None]]:
    """Watch over a run of several processes, so that none waits for ever for one that is stuck.

    The body calls what it gets with what it does next, as in "reading the batch of step 8": a sign
    of life; with None before what may last. Where no sign of life comes for `timeout` seconds a
    thread says what this process was doing, then which processes do not answer, and ends this one
    with exit code 1. An error of the body that a lost process explains is raised as RuntimeError.
    """
    if jax.process_count() == 1:
        yield lambda doing: None
        return
    left, longest = threading.Event(), 0.0
    sign: tuple[str | None, float] = (None, time.monotonic())

    def phase(doing: str | None) -> None:
        nonlocal sign, longest
        now = time.monotonic()
        if sign[0] is not None:
            longest = max(longest, now - sign[1])
        sign = (doing, now)

    def look() -> None:
        while not left.wait(min(timeout / 4, 1.0)):
            doing, since = sign
            silent = time.monotonic() - since
            if doing is None or silent <= timeout:
                continue
            _say(f"{_name()}: no progress for {silent:.0f} s, launch.timeout={timeout:g}: {doing}")
            # others may be up to a step behind with noticing it
            missing = missing_processes(ROLL_CALL + min(longest, timeout / 10, LAST_RESORT / 2))
            if missing:
                _say(f"{_name()}: no answer from {missing}")
            _leave(1)

    threading.Thread(target=look, name="watch", daemon=True).start()
    try:
        yield phase
    except Exception as error:
        left.set()
        if reason := explain_lost(error, sign[0]):
            raise RuntimeError(reason) from error
        raise
    finally:
        left.set()


def explain_lost(error: Exception, doing: str | None = None) -> str | None:
    """One line that says which processes are gone, where `error` is what JAX raises when one is;
    None for any other error. Takes up to ROLL_CALL seconds to ask them.
    """
    lost = re.compile("gloo|nccl|connection|socket|heartbeat|unavailable|barrier", re.IGNORECASE)
    if jax.process_count() == 1 or not lost.search(str(error)):
        return None
    missing = missing_processes(ROLL_CALL)
    if missing is None:
        return None
    while_doing = f" while {_name()} was {doing}" if doing else ""
    reason = str(error).strip().partition("\n")[0]
    return f"{missing} died or lost the connection{while_doing}: {reason}"


@functools.cache  # a process answers one roll call in its life, the one before it ends
def missing_processes(patience: float) -> str | None:
    """Who does not come to a roll call within `patience` seconds, as in "process 1 of 2"; None
    where all come, or nobody knows.
    """
    from orbax.checkpoint.multihost import get_barrier_sync_fn

    refusals = []

    def call() -> None:
        try:
            barrier = get_barrier_sync_fn()
            barrier(key="meshwright roll call", timeout_ms=round(1000 * patience))
            refusals.append("")
        except Exception as error:
            refusals.append(str(error))

    # on a thread of its own: where process 0 is stopped, its coordination service never answers
    thread = threading.Thread(target=call, name="roll call", daemon=True)
    thread.start()
    thread.join(patience + 3)
    names = re.search(r"timed out task names:([\s\d,]+)", refusals[0]) if refusals else None
    if refusals and names is None:
        return None
    missing = sorted(map(int, re.findall(r"\d+", names[1]))) if names else [0]
    plural = "es" if len(missing) > 1 else ""
    return f"process{plural} {', '.join(map(str, missing))} of {jax.process_count()}"


def end_processes(code: int) -> None:
    """End this process where Python's own end would wait too long: for a thread that compiles or
    reads when the run was stopped (75); for the other processes, up to minutes, when this one
    failed. A failed process waits just long enough for the others to fail alike.
    """
    if code == 0 or (code != 75 and not jax.distributed.is_initialized()):
        return
    if code == 75:
        jax.distributed.shutdown()  # all have agreed to stop
    else:
        with suppress(RuntimeError):  # no backend
            missing_processes(ROLL_CALL)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End at once; process 0 a second later, because JAX aborts the others when its coordination
    service is gone.
    """
    with suppress(RuntimeError):  # no backend
        if is_first() and jax.process_count() > 1:
            time.sleep(1)
    leave(code)


def _name() -> str:
    return f"process {jax.process_index()} of {jax.process_count()}"


def _say(line: str) -> None:
    print(f"meshwright: {line}", file=sys.stderr, flush=True)
