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
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import reduce
from itertools import pairwise
from operator import getitem
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, from_json

from ...sharding.keys import is_utf8, local_problem, user_path
from . import Config

PRESETS = Path(__file__).parents[2] / "configs"
CONFIG = TypeAdapter(Config)
LINE = 110
"""Columns of what `describe` prints."""


UNREADABLE = (yaml.YAMLError, ValueError, LookupError, AttributeError)
"""What PyYAML raises; all but the first where a tag such as !!float stands before what is none."""


class ConfigError(ValueError):
    """The user's config is wrong; the message is one line that names the key."""


_TAG = "tag:yaml.org,2002:"
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)\Z")
_FLOAT = re.compile(
    r"([-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z"
)
_DIGITS = 100
"""Characters of the longest integer; Python itself refuses some thousands, in words of its own."""


class _Loader(yaml.SafeLoader):
    """YAML in which `1e-3` is a number, and dates, 010 and 1:30, in YAML 1.1 eight and ninety, are
    text; a key is written once.
    """

    yaml_implicit_resolvers = {
        first: [
            (tag, regexp)
            for tag, regexp in resolvers
            if tag.removeprefix(_TAG) not in ("timestamp", "int", "float")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        text, problem = self.construct_scalar(node), None
        if not _INTEGER.match(text):
            problem = f"{text} is not an integer"
        elif len(text) > _DIGITS:
            problem = f"an integer of {len(text)} characters is more than any key takes"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return self.construct_yaml_int(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key, count in Counter(key.value for key in keys).items():
            if count > 1:
                mark = [other for other in keys if other.value == key][-1].start_mark
                raise yaml.MarkedYAMLError(problem=f"{key} is written twice", problem_mark=mark)
        return super().construct_mapping(node, deep)


_Loader.add_constructor(f"{_TAG}int", _Loader.construct_integer)


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads back, and other readers, too: text that is a number to us or in
    YAML 1.1 is quoted.
    """


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Only double quotes escape a line break; in other styles some of Unicode's would be lost.
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar(f"{_TAG}str", text, style)


_Dumper.add_representer(str, _represent_text)

for _side in (_Loader, _Dumper):  # the dumper has to know which text to quote
    for _kind, _regexp in (("int", _INTEGER), ("float", _FLOAT)):
        _side.add_implicit_resolver(f"{_TAG}{_kind}", _regexp, list("-+.0123456789"))


def load(name_or_path: str | Path, *overrides: str) -> Config:
    """Load a preset or a YAML file, with overrides such as `mesh.tensor=2`. A value that begins
    with one of [ { " ' is YAML; any other is a number, true, false or null, or else text as it
    stands.

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
        return CONFIG.validate_json(json.dumps(tree))
    except ValidationError as error:
        lines = dict.fromkeys(_explain(details) for details in error.errors(include_url=False))
        raise ConfigError(_one_line("; ".join(lines))) from None


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
    rows, tree = [], dataclasses.asdict(config)
    for path, field in _fields(Config):
        text = "  " * (len(path) - 1) + path[-1] + ":"
        if not dataclasses.is_dataclass(field.annotation):
            text += " " + _flow(reduce(getitem, path, tree))
        comment = field.description or ""
        choices = [str(choice) for choice in _choices(field.annotation)]
        if not all(choice in comment for choice in choices):
            comment += ": " + " | ".join(choices)
        rows.append((text, comment))
    column = min(2 + max(len(text) for text, _ in rows), 48)
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
    check_text(source)
    if problem := local_problem(source):
        raise ConfigError(f"{'base=' if chain else ''}{_short(source)}: {problem}")
    try:
        written = presets().get(source, folder / user_path(source))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if written.is_dir() and (run := _run_folder(written)):
        raise ConfigError(
            f"{source}: is a folder of a run, no config; write {run / 'config.yaml'}, and "
            f"checkpoint.resume=auto to go on training it"
        )
    path = written.resolve()
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


def _run_folder(path: Path) -> Path | None:
    """The run folder that a folder is, or lies in as one of its checkpoints."""
    folders = (path, path.parent, path.parent.parent)
    return next((folder for folder in folders if (folder / "config.yaml").is_file()), None)


def _layer(override: str) -> dict[str, Any]:
    """`mesh.tensor=2` -> {"mesh": {"tensor": 2}}."""
    check_text(override)
    key, equals, text = override.partition("=")
    names = key.split(".")
    if not equals or not all(names):
        line = f"{_short(override)}: an override is written key=value, as in train.steps=100"
        raise ConfigError(line)
    tree = reduce(lambda below, name: {name: below}, reversed(names), read_value(text, key))
    return _as_json(tree, _short(override))


def read_value(text: str, key: str) -> Any:
    """What stands after `key=`, nothing of it left out: YAML where it begins as a list, a mapping
    or a quoted text does; the number, true, false or null that all of it is; null where nothing
    does; else the text itself. Raises ConfigError.
    """
    if text.startswith(("[", "{", '"', "'")):
        return _read_yaml(text, key)
    loader = _Loader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))
    kind = tag.removeprefix(_TAG)
    # YAML 1.1 takes these for null, true and false, a user for a home folder and for words
    word = text == "~" or (kind == "bool" and text.lower() not in ("true", "false"))
    # a resolver's $ overlooks a line break at the end
    if word or text.endswith("\n") or kind not in ("null", "bool", "int", "float"):
        return text
    try:
        return loader.construct_object(yaml.ScalarNode(tag, text))
    except UNREADABLE as error:
        raise ConfigError(f"{_short(f'{key}={text}')}: {_problem(error)}") from None


def _read_yaml(text: str, key: str) -> Any:
    """The value of YAML text that is one list, mapping or quoted text and nothing else."""
    origin = _short(f"{key}={text}")
    cure = "to mean the text itself, quote it for YAML, and once more for the shell"
    if text[0] == "[":
        cure = f'quote the words in it, as in ["a #b", "c"]; {cure}'
    if len(text) < 60:
        quoted = json.dumps(text, ensure_ascii=False)
        cure += f": {shlex.quote(_one_line(f'{key}={quoted}'))}"
    try:
        value = parse(text, origin)
    except ConfigError as error:
        raise ConfigError(f"{error}; {cure}") from None
    node, tokens = yaml.compose(text, _Loader), list(yaml.scan(text, _Loader))
    gaps = [text[a.end_mark.index : b.start_mark.index] for a, b in pairwise(tokens)]
    # `"a": b` begins like a quoted text, and is a mapping
    alone = getattr(node, "flow_style", True) and node.end_mark.index == len(text)
    named = any(isinstance(token, yaml.AnchorToken) for token in tokens)
    if not alone or named or any("#" in gap for gap in gaps):
        raise ConfigError(
            f"{origin}: a comment, a name after &, or anything after the first value would be left "
            f"out; {cure}"
        )
    return value


def parse(text: str, origin: str) -> Any:
    """The value that YAML text stands for. Raises ConfigError naming `origin`."""
    try:
        value = yaml.load(text, _Loader)
    except RecursionError:
        raise ConfigError(f"{origin}: nested too deep") from None
    except UNREADABLE as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{origin}, line {mark.line + 1}" if mark and "\n" in text else origin
        raise ConfigError(f"{where}: {_problem(error)}") from None
    return _as_json(value, origin)


def _as_json(value: Any, origin: str) -> Any:
    """A value as JSON holds it, which is how a tree is validated. Raises ConfigError."""
    try:
        return from_json(json.dumps(value, default=str))
    except RecursionError:
        problem = "nested too deep"
    except (TypeError, ValueError) as error:  # a key that is no text, half a surrogate pair
        problem = "nested too deep" if "recursion" in str(error) else f"is no config: {error}"
    raise ConfigError(f"{origin}: {problem}")


def check_text(text: str) -> None:
    """Raises ConfigError where text came from bytes that are not UTF-8."""
    if not is_utf8(text):
        raise ConfigError(f"{_short(text)}: is not UTF-8; write it in UTF-8")


def _problem(error: Exception) -> str:
    """What an error of YAML's complains of."""
    return " ".join(str(getattr(error, "problem", error)).split())


def _one_line(text: str) -> str:
    """Text with line breaks, and what else cannot be printed, escaped."""
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def _short(text: str) -> str:
    """Text as a message names it: on one line, its end cut off where it is long."""
    line = _one_line(text)
    return line if len(line) <= LINE else line[: LINE - 1] + "…"


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


RENAMED = {
    "model.experts": "model.moe.experts",
    "model.experts_per_token": "model.moe.experts_per_token",
    "model.expert_d_ff": "model.moe.d_ff",
    "model.shared_experts": "model.moe.shared_experts",
    "model.router_scores": "model.moe.scores",
    "model.normalize_gates": "model.moe.normalize_gates",
    "model.gate_scale": "model.moe.gate_scale",
    "model.expert_groups": "model.moe.groups",
    "model.groups_per_token": "model.moe.groups_per_token",
    "model.random_second": "model.moe.second_expert",
    "model.capacity": "model.moe.capacity_factor",
    "model.routing_group": "model.moe.routing_group",
    "model.overflow": "model.moe.overflow",
    "model.balance_loss": "model.moe.aux_loss",
    "model.balance": "model.moe.aux_loss_over",
    "model.router_z_loss": "model.moe.z_loss",
    "model.balance_bias": "model.moe.bias_update_rate",
    "layout.overlap_directions": "layout.overlap",
    "optimizer.warmup_tokens": "optimizer.warmup",
    "optimizer.factor_from": "optimizer.min_dim_size_to_factor",
    "checkpoint.background": "checkpoint.asynchronous",
    "device.coordinator": "launch.coordinator",
    "device.process_id": "launch.process_id",
    "device.process_count": "launch.process_count",
    "device.timeout": "launch.timeout",
}
"""What keys were once called -> their names."""


def _unknown(key: str) -> str:
    """An unknown key and its new name, or the nearest known: by its last name, in its own section
    before others.
    """
    if key in RENAMED:
        return f"{key}: no such key; it is called {RENAMED[key]} now"
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
