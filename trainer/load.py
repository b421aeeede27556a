"""From a preset's name or a path to a frozen `Config`, and back to YAML. No JAX here.

A config is a stack of YAML layers: the chain of `base:` files, the file itself, then each
`key=value` override. Mappings merge, anything else replaces, and what is never written keeps its
default. Only the finished tree is validated; what is wrong with it becomes one line.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import reduce
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from .config import Config

PRESETS = Path(__file__).parent.parent / "configs"
CONFIG = TypeAdapter(Config)
LINE = 110
"""Columns of what `describe` prints."""


class ConfigError(ValueError):
    """The user's config is wrong; the message is one line that names the key."""


class _Loader(yaml.SafeLoader):
    """YAML in which `1e-3` is a number, a date is text, and a key is written once."""

    # PyYAML would build a `datetime.date`, which no field is, from run.name=2026-01-31.
    yaml_implicit_resolvers = {
        first: [(tag, regexp) for tag, regexp in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key, count in Counter(key.value for key in keys).items():
            if count > 1:
                mark = [other for other in keys if other.value == key][-1].start_mark
                raise yaml.MarkedYAMLError(problem=f"{key} is written twice", problem_mark=mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads back: text that looks like `1e-3` is quoted."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Only double quotes escape a line break; in other styles some of Unicode's would be lost.
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _represent_text)

# YAML 1.1 wants a dot in every float; the dumper needs the same rule to know which text to quote.
for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
        list("-+.0123456789"),
    )


def load(name_or_path: str | Path, *overrides: str) -> Config:
    """Load a preset or a YAML file, with overrides such as `mesh.tensor=2`, values in YAML.

    A preset's name wins over a file of that name; write ./tiny for the file. Raises ConfigError,
    all mistakes on one line.
    """
    return _build(_read(str(name_or_path), Path()), overrides)


def override(config: Config, *overrides: str) -> Config:
    """`config` with `key=value` overrides applied. Raises ConfigError as `load` does."""
    return _build(dataclasses.asdict(config), overrides)


def _build(tree: dict[str, Any], overrides: Iterable[str]) -> Config:
    tree = reduce(_merge, map(_layer, overrides), tree)
    try:
        # JSON is the mode in which strict pydantic builds nested dataclasses from mappings.
        return CONFIG.validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        lines = dict.fromkeys(_explain(details) for details in error.errors(include_url=False))
        raise ConfigError("; ".join(lines)) from None


def presets() -> dict[str, Path]:
    """Name of each shipped preset -> its YAML file."""
    return {path.stem: path for path in sorted(PRESETS.glob("*.yaml"))}


def from_yaml(text: str, origin: str) -> Config:
    """The Config that `to_yaml` wrote. Raises ConfigError naming `origin`."""
    return _build(parse(text, origin), ())


def to_yaml(config: Config) -> str:
    """The whole resolved tree, defaults included; it loads again to an equal Config."""
    tree = dataclasses.asdict(config)
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def describe(config: Config) -> str:
    """The tree of `to_yaml` with each field's description, and its choices, as aligned comments."""
    rows = []
    for path, field in _fields(Config):
        value = reduce(getattr, path, config)
        text = "  " * (len(path) - 1) + path[-1] + ":"
        if not dataclasses.is_dataclass(value):
            text += " " + _flow(value)
        comment = field.description or ""
        choices = [str(choice) for choice in _choices(field.annotation)]
        if not all(choice in comment for choice in choices):
            comment += ": " + " | ".join(choices)
        rows.append((text, comment))
    column = min(2 + max(len(text) for text, _ in rows), 40)
    lines = []
    for text, comment in rows:
        remarks = textwrap.wrap(comment, LINE - column - len("# "))
        if remarks and len(text) <= column - 2:
            text = f"{text:{column}}# {remarks.pop(0)}"
        lines += [text, *(f"{'':{column}}# {remark}" for remark in remarks)]
    return "\n".join(lines) + "\n"


def schema() -> dict[str, Any]:
    """JSON schema of the config tree, for editors."""
    return CONFIG.json_schema()


def _read(source: str, folder: Path, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The merged tree of a file and its bases; `chain` holds the files that led here."""
    path = presets().get(source, folder / Path(source).expanduser()).resolve()
    if not path.is_file():
        near = _did_you_mean(source, presets())
        raise ConfigError(f"{source}: no such preset or file; choose {', '.join(presets())}{near}")
    if path in chain:
        circle = " -> ".join(step.name for step in (*chain, path))
        raise ConfigError(f"base: {circle} goes in a circle")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    tree = parse(text, str(path))
    if tree is None:  # an empty file: all defaults
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: should be a mapping of sections, not {show(tree)}")
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"base={show(base)}: should be one preset's name or path ({path})")
    return _merge(_read(base, path.parent, (*chain, path)), tree)


def _layer(override: str) -> dict[str, Any]:
    """`mesh.tensor=2` -> {"mesh": {"tensor": 2}}."""
    key, equals, text = override.partition("=")
    names = key.split(".")
    if not equals or not all(names):
        raise ConfigError(f"{override}: an override is written key=value, as in train.steps=100")
    return reduce(lambda below, name: {name: below}, reversed(names), parse(text, override))


def parse(text: str, origin: str) -> Any:
    """The value that YAML text stands for. Raises ConfigError naming `origin`."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a tag such as !!int before text
        mark = getattr(error, "problem_mark", None)
        where = f"{origin}, line {mark.line + 1}" if mark and "\n" in text else origin
        problem = " ".join(str(getattr(error, "problem", error)).split())
        raise ConfigError(f"{where}: {problem}") from None


def _merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        below = under.get(key)
        # an empty mapping empties: mesh.dcn={}
        if isinstance(below, dict) and isinstance(value, dict) and value:
            value = _merge(below, value)
        merged[key] = value
    return merged


def _explain(error: ErrorDetails) -> str:
    """One of pydantic's errors as a line for people."""
    key, kind, value = ".".join(map(str, error["loc"])), error["type"], error["input"]
    context = error.get("ctx", {})
    if kind == "value_error":  # raised by a __post_init__, written for people already
        return str(context["error"])
    if kind == "unexpected_keyword_argument":
        return _unknown(key)
    if kind == "dataclass_type":
        return f"{key}={show(value)}: {key} is a section; write {key}.KEY=value"
    problem = _WORDS.get(kind) or error["msg"].removeprefix("Input ").removeprefix("String ")
    line = f"{key}={show(value)}: {problem}"
    if kind == "literal_error":
        line += _did_you_mean(str(value), re.findall(r"'([^']+)'", context["expected"]))
    return line


_WORDS = {
    "string_type": "should be text; quote it for YAML, and once more for the shell",
    "list_type": "should be a list, [a, b]",
    "dict_type": "should be a mapping, {a: 1}",
}
"""Where pydantic speaks JSON: its type of error -> what to say instead."""


def _unknown(key: str) -> str:
    """An unknown key and the nearest known: by its last name, in its own section before others."""
    section, _, name = key.rpartition(".")
    every = [".".join(path) for path, _ in _fields(Config)]
    siblings = [other for other in every if other.rpartition(".")[0] == section]
    for keys in (siblings, every):
        by_name = {other.rpartition(".")[2]: other for other in reversed(keys)}
        if near := get_close_matches(name, by_name, n=1):
            return f"{key}: no such key; did you mean {by_name[near[0]]}?"
    return f"{key}: no such key; known are {', '.join(siblings)}"


def _did_you_mean(word: str, words: Iterable[str]) -> str:
    near = get_close_matches(word, words, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _fields(kind: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Path and declaration of every section and field, in the order they are declared."""
    for name, field in kind.__pydantic_fields__.items():
        yield (*above, name), field
        if dataclasses.is_dataclass(field.annotation):
            yield from _fields(field.annotation, (*above, name))


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The named choices inside a type, wherever its Literal stands."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(choice for part in get_args(annotation) for choice in _choices(part))


def _flow(value: Any) -> str:
    """A value as YAML on one line."""
    text = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, width=math.inf, allow_unicode=True
    )
    return text.removesuffix("...\n").strip()


def show(value: Any) -> str:
    """A value as YAML for a message, shortened."""
    return textwrap.shorten(_flow(value), 60, placeholder="…")
