"""Requests to stop: what waits is left at once, what goes on ends between two items, together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from itertools import islice

import pytest

from meshwright.trainer.runtime.stop import (
    Agreement,
    Stop,
    Stopped,
    in_background,
    stop_on_signals,
    until_stopped,
)


def test_a_result_that_is_there_comes_whether_a_stop_is_asked_or_not():
    stop, future = Stop(), Future()
    future.set_result(7)
    assert stop.result(future) == 7
    stop.ask("SIGTERM")
    assert stop.result(future) == 7


def test_the_wait_for_a_result_ends_when_a_stop_is_asked():
    stop = Stop()
    threading.Timer(0.1, stop.ask, ["SIGTERM"]).start()
    with pytest.raises(Stopped, match="SIGTERM"):
        stop.result(Future())
    stop.ask("again, which changes nothing")
    with pytest.raises(Stopped, match="SIGTERM"):
        stop.result(Future())


def test_work_in_the_background_gives_its_result_or_its_error():
    stop = Stop()
    assert stop.result(in_background(lambda: threading.current_thread().name)) == "background"
    with pytest.raises(OSError, match="disk gone"):
        stop.result(in_background(lambda: (_ for _ in ()).throw(OSError("disk gone"))))


@pytest.mark.parametrize("segment", [1, 2, 3, 10])
@pytest.mark.parametrize(("late", "seen"), [(0, [0, 1, 2]), (1, [0, 1, 2, 3])])
def test_items_end_after_the_answer(late, seen, segment):
    """However often the loop stops between them: what was asked stays asked."""
    answers, items = iter([False, False, False, True, True, True, True]), iter(range(10))
    agreement, got = Agreement(lambda: next(answers), late), []
    with pytest.raises(Stopped):
        while True:
            for item in until_stopped(islice(items, segment), agreement):
                got.append(item)
    assert got == seen


def test_without_a_request_all_items_come():
    assert list(until_stopped(range(5), Agreement(lambda: False, 1))) == list(range(5))


SIGNALS = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT]


@pytest.fixture(autouse=True)
def hangups_count():
    """Though the tests themselves may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_asks_and_the_old_handlers_return(number):
    before = [signal.getsignal(each) for each in SIGNALS]
    with stop_on_signals(grace=60) as stop:
        assert not stop.asked()
        os.kill(os.getpid(), number)
        with pytest.raises(Stopped, match=number.name):
            stop.result(Future())
    assert [signal.getsignal(each) for each in SIGNALS] == before
    assert "signals" not in [thread.name for thread in threading.enumerate()]


def test_a_hangup_that_is_ignored_stays_so():
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals(grace=60) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(Stopped, match="SIGTERM"):
                stop.result(Future())
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_off_the_main_thread_signals_stay_as_they_are():
    before = signal.getsignal(signal.SIGTERM)

    def work():
        with stop_on_signals(grace=60) as stop:
            return stop.asked(), signal.getsignal(signal.SIGTERM)

    assert in_background(work).result(timeout=10) == (False, before)


BUSY = """
import threading
from meshwright.trainer.runtime.stop import stop_on_signals
with stop_on_signals(grace=GRACE):
    print("ready", flush=True)
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # never comes back to Python, like a compiler
"""


def busy(grace: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY.replace("GRACE", str(grace))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_the_grace_is_kept_even_where_the_run_cannot_stop():
    process = busy(0.5)
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert 0.4 < time.monotonic() - start < 10
    assert errors == "meshwright: not saved within checkpoint.grace=0.5 s\n"


def test_a_second_interrupt_ends_at_once():
    process = busy(60)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert errors == "meshwright: ended at once; the newest checkpoint is what it was\n"
