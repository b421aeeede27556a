"""Where Meshwright keeps what can be made again: token stores and compiled programs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/meshwright, or ~/.cache/meshwright."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "meshwright"
