"""Where Meshwright keeps what can be made again: token stores and compiled programs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/meshwright, or ~/.cache/meshwright. Raises ValueError where a user has no
    home.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base, "meshwright")
    try:
        return Path.home() / ".cache" / "meshwright"
    except RuntimeError:  # a container may run as a user that its system does not know
        raise ValueError(
            "HOME is not set and the system knows no home folder of this user: set HOME or "
            "XDG_CACHE_HOME, or write data.store=FOLDER device.compile_cache=null"
        ) from None
