"""Being asked to stop: SIGTERM, SIGHUP and Ctrl-C become a request that the run answers between two
steps, at an evaluation, or while it waits for data or the compiler.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class Stopped(Exception):
    """The run ends early because it was asked to; the message says what was saved."""


class Stop:
    """A request that may come at any moment, from a signal or from another thread."""

    def __init__(self) -> None:
        self._request: Future[str] = Future()

    def ask(self, why: str) -> None:
        """Ask the run to stop; the first request counts."""
        if not self._request.done():
            self._request.set_result(why)

    def asked(self) -> bool:
        return self._request.done()

    def result(self, future: Future[T]) -> T:
        """What `future` gives. Raises Stopped if a stop is asked for before it is there."""
        either: list[Future[Any]] = [future, self._request]
        wait(either, return_when=FIRST_COMPLETED)
        if not future.done():
            raise Stopped(self._request.result())
        return future.result()


@dataclass(frozen=True)
class Agreement:
    """How processes agree to stop: before each item all `ask` whether one wants to, and look at the
    answer `late` items later, so that the devices need not wait for it.
    """

    ask: Callable[[], Any]
    late: int
    answers: deque[Any] = field(default_factory=deque)


def until_stopped(items: Iterable[T], agreement: Agreement) -> Iterator[T]:
    """`items` until a stop is agreed on, then raises Stopped; in every process before the same."""
    answers = agreement.answers
    for item in items:
        answers.append(agreement.ask())
        if len(answers) > agreement.late and answers.popleft():
            raise Stopped
        yield item


def in_background(work: Callable[[], T]) -> Future[T]:
    """`work` on a thread of its own, so that a stop need not wait for its end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="background", daemon=True).start()
    return future


@contextmanager
def stop_on_signals(grace: float) -> Iterator[Stop]:
    """A Stop that SIGTERM, SIGHUP and Ctrl-C ask; `grace` seconds later the process ends, saved or
    not. A second Ctrl-C ends it at once; in an interactive session it is a KeyboardInterrupt
    instead. A SIGHUP that is ignored, as `nohup` has it, stays so.

    Python runs signal handlers in its main thread, which may be in the compiler for minutes; so a
    thread of its own reads the signals from a pipe. Off the main thread no signal can be caught,
    and none is.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    caught = [number for number in SIGNALS if not (ignored and number == signal.SIGHUP)]
    interactive = hasattr(sys, "ps1") or "ipykernel" in sys.modules
    interrupts = 0

    def interrupt(number: int, frame: Any) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        if interactive and interrupts > 1:
            raise KeyboardInterrupt

    def listen() -> None:
        interrupts, timer = 0, None
        while number := os.read(receiver, 1)[0]:  # 0 is no signal: the run has ended
            interrupts += number == signal.SIGINT
            if interrupts > 1 and not interactive:
                _end("ended at once; the newest checkpoint is what it was")
            if timer is None and number in SIGNALS:
                timer = threading.Timer(
                    grace, _end, [f"not saved within checkpoint.grace={grace} s"]
                )
                timer.daemon = True
                timer.start()
                stop.ask(signal.Signals(number).name)
        if timer is not None:
            timer.cancel()

    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    previous_sender = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    previous = {number: signal.signal(number, interrupt) for number in caught}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_sender)
        os.write(sender, b"\0")
        thread.join()
        os.close(receiver)
        os.close(sender)


def _end(why: str) -> None:
    print(f"meshwright: {why}", file=sys.stderr, flush=True)
    leave(1)


def leave(code: int) -> NoReturn:
    """End the process without waiting for any thread."""
    if sys.stdout is not None and sys.stderr is not None:
        with suppress(OSError):
            if sys.stdout.isatty():
                sys.stdout.write("\x1b[?25h")  # a progress bar hides the cursor
            sys.stdout.flush()
            sys.stderr.flush()
    os._exit(code)
