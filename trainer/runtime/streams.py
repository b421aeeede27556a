"""stdout and stderr of the command, whose readers may go away, and whose disk may be full."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import Any


class Stream(io.FileIO):
    """A standard stream whose writing never fails: it drops what cannot be written.

    error: the first refusal, None where there was none, or only a reader that went away.
    """

    def __init__(self, descriptor: int):
        super().__init__(descriptor, "w", closefd=False)
        self.error: OSError | None = None
        # a terminal that is gone refuses like a broken disk
        self._gone = {errno.EPIPE, errno.EIO} if self.isatty() else {errno.EPIPE}

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:  # a full pipe of the kind that fails
                select.select([], [self], [])
        except OSError as error:
            if error.errno not in self._gone:
                self.error = self.error or error
            return memoryview(data).nbytes
        return written


def open_streams() -> Stream:
    """Put sys.stdout and sys.stderr in the place of Python's own: writing to them never fails, and
    they write what they cannot encode as a question mark. Returns the one below stdout.

    A descriptor that is closed becomes the null device: else the next file that is opened got its
    number, and what libraries print would be written into that file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    stdout = Stream(1)
    sys.stdout, sys.stderr = _text(stdout, sys.stdout), _text(Stream(2), sys.stderr)
    return stdout


def _text(stream: Stream, former: Any) -> io.TextIOWrapper:
    """As Python has opened the former one; None: where it was closed."""
    return io.TextIOWrapper(
        io.BufferedWriter(stream),
        encoding=getattr(former, "encoding", "utf-8"),
        errors="replace",
        line_buffering=former is not None and (former.line_buffering or former.write_through),
    )
