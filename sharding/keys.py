"""How config sections declare their keys: strictly, as local paths, as read in some settings only.
No JAX here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""What every section is: no unknown key, no value of another type, no number that is none."""

INT32 = Field(lt=2**31)
"""What integers are declared with that devices count with."""

URL = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]+:/")
"""How a URL begins; with one slash, since that is what pathlib leaves of two."""


def local_problem(path: str) -> str | None:
    """Why no local file or folder can be meant by a path; None: one can."""
    if URL.match(path):
        local = "./" + re.sub("/+", "/", path)
        return f"URLs are not built yet; write a local path, or {local} for a folder of that name"
    if "\0" in path:
        return "no path holds a NUL character; write a local path"
    return None


def check_local(path: str | os.PathLike[str], key: str = "") -> None:
    """Raises ValueError where a path is no local one; `key` says who names it, as in `--png `."""
    if problem := local_problem(text := os.fspath(path)):
        raise ValueError(f"{key}{text}: {problem}".replace("\0", "\\0"))


def is_utf8(text: str) -> bool:
    """False where bytes of a file's name or of an argument were not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def user_path(path: str) -> Path:
    """A local path with the home folder in place of ~. Raises ValueError where there is none."""
    expanded = os.path.expanduser(path)
    if path.startswith("~") and expanded == path:
        raise ValueError(f"{path}: there is no home folder of that user; write the whole path")
    return Path(expanded)


def _local(path: str) -> str:
    if problem := local_problem(path):
        raise PydanticCustomError("local_path", "{problem}", {"problem": problem})
    return path


LocalPath = Annotated[str, Field(min_length=1), AfterValidator(_local)]
"""What keys that name a file or a folder are declared as."""


@dataclass(frozen=True)
class ReadWhen:
    """Declares that a key is read only where another key of its section has one of `values`; where
    it has none of them, `check_read` refuses the key. No values: anything but null, false and 0.
    """

    key: str
    values: tuple[Any, ...] = ()

    def holds(self, section: Any) -> bool:
        other = getattr(section, self.key)
        return other in self.values if self.values else bool(other)


def check_read(section: Any, name: str) -> None:
    """Raises ValueError where a key of the config section `name` is written and not read. Written
    is what differs from the key's default: declare it `| None = None`, and what null stands for in
    a property, where its usual value has to be noticed as well.
    """
    for key, value, default, condition in _written(section):
        if not condition.holds(section):
            other, found = f"{name}.{condition.key}", getattr(section, condition.key)
            cure = f"; write {other}={'true' if found is False else '…'} or leave it out"
            if condition.values:
                cure = f", only by {_flow(condition.values)}; leave it out"
            default = f"{name}.{key}={_flow(default)}"  # a base file may have written the key
            raise ValueError(
                f"{name}.{key}={_flow(value)} is not read by {other}={_flow(found)}{cure}: "
                f"{default}"
            )


def _written(section: Any) -> Iterator[tuple[str, Any, Any, ReadWhen]]:
    """Key, value, default and each condition of the keys of a section that are not left at their
    default.
    """
    for key, field in type(section).__pydantic_fields__.items():
        value, default = getattr(section, key), field.get_default(call_default_factory=True)
        if value != default:
            for condition in field.metadata:
                if isinstance(condition, ReadWhen):
                    yield key, value, default, condition


def _flow(value: Any) -> str:
    """A value as it is written in an override, several without brackets."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case float():
            return repr(value).replace("e-0", "e-")
        case list():
            return f"[{_flow(tuple(value))}]"
        case tuple():
            return ", ".join(map(_flow, value))
    return str(value)
