"""Trees of settings compared key by key: what a run's config was and is, and those of processes."""

from __future__ import annotations

from typing import Any

from .load import show


def flat(tree: dict[str, Any], above: str = "") -> dict[str, Any]:
    """`{"mesh": {"data": 2}}` -> `{"mesh.data": 2}`."""
    found = {}
    for key, value in tree.items():
        below = flat(value, f"{above}{key}.") if isinstance(value, dict) else {above + key: value}
        found |= below
    return found


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Key -> `mesh.data=2, now 4` for every key of two config trees that differs."""
    old, new = flat(before), flat(now)
    return {
        key: f"{key}={show(old.get(key))}, now {show(new.get(key))}"
        for key in old | new
        if old.get(key) != new.get(key)
    }


def within(key: str, names: tuple[str, ...]) -> bool:
    """Whether a key is one of the names, or lies in a section of that name."""
    return any(key == name or key.startswith(f"{name}.") for name in names)
