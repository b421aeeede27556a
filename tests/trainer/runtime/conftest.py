"""A start of several processes without any."""

from __future__ import annotations

import jax
import pytest

from meshwright.trainer.config import DeviceConfig
from meshwright.trainer.runtime import schedulers
from meshwright.trainer.runtime.processes import start_processes


@pytest.fixture
def start(monkeypatch):
    """Calls `start_processes` and gives what JAX was to be started with; None: not at all."""

    def start(environ, packages=(), **settings):
        calls = []
        monkeypatch.setattr(jax.distributed, "initialize", lambda **options: calls.append(options))
        monkeypatch.setattr(jax.config, "update", lambda *setting: calls.append(setting))
        monkeypatch.setattr(
            schedulers.importlib.util, "find_spec", lambda name: name if name in packages else None
        )
        start_processes(DeviceConfig(**settings), environ)
        if not calls:
            return None
        preemption, options = calls
        assert preemption == ("jax_enable_preemption_service", False)
        limits = {options.pop(name) for name in list(options) if "timeout" in name}
        assert limits == {int(settings.get("timeout", 300)) + 60}  # ours come first
        return options

    return start
