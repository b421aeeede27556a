"""What Orbax needs: paths that it takes literally, silence, its errors in a few words."""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...sharding.keys import is_utf8


@contextmanager
def plain_path(path: Path) -> Iterator[Path]:
    """`path` under a name that Orbax and tensorstore take literally. They read some characters as a
    pattern or a URL, and say nothing when what they have written is not found again; then it is a
    link to the folder, in the machine's folder for temporary files, as long as the context lasts.
    """
    path = path.absolute()
    if not special(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        link = Path(folder, "link")
        if special(link):
            raise ValueError(f"TMPDIR={folder}: Orbax cannot use this path; write another TMPDIR")
        link.symlink_to(path)
        yield link


def special(path: Path) -> bool:
    """Whether Orbax or tensorstore may take something in an absolute path for a pattern or URL, or
    cannot take it because it is not UTF-8.
    """
    text = str(path)
    return bool(re.search(r"[*?\[\]\\]|:/", text)) or not is_utf8(text)


def reason(error: Exception) -> str:
    """An error of the disk in a few words; tensorstore wraps the system's in many."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    found = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(found[1])) if found else str(error).partition("\n")[0][:300]


@functools.cache
def hush_orbax() -> None:
    """Where Orbax fails it raises the first error, which we report. It also logs it with its whole
    traceback, and the parts that were under way beside it each print another when they end.
    """
    for logger in ("absl", "asyncio"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine '.*' was never awaited", RuntimeWarning)
    print_unraisable = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        abandoned = code is not None and "orbax" in code.co_filename
        if not abandoned and str(unraisable.exc_value) != "Event loop is closed":
            print_unraisable(unraisable)

    sys.unraisablehook = hook
