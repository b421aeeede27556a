"""Matplotlib for a picture in a file, which takes no backend: none is chosen, and none can fail."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any


def empty_figure(**settings: Any) -> Any:
    """A `matplotlib.figure.Figure`, without pyplot. MPLBACKEND may name a backend that is not
    installed, needs a display, or does not exist.
    """
    if "matplotlib" not in sys.modules:
        _import_matplotlib()
    from matplotlib.figure import Figure

    return Figure(**settings)


def _import_matplotlib() -> None:
    """Import it as it imports itself, but that a backend which does not exist is not chosen."""
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    if backend:
        with suppress(ValueError):
            matplotlib.rcParams["backend"] = backend
