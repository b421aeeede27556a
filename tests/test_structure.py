"""The shape of the house: who may import whom, what is packaged, what stays free of JAX."""

from __future__ import annotations

import ast
import dataclasses
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import meshwright
from meshwright.trainer.config.load import presets

ROOT = Path(__file__).parent.parent
PACKAGES = ("sharding", "models", "trainer", "scripts")  # each imports what stands to its left
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
OUTSIDE = sorted(path for name in ("tests", "examples") for path in (ROOT / name).rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    """Absolute names of what a file imports, at its top or inside functions."""
    package = ["meshwright", *path.relative_to(ROOT).parent.parts]
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            # `from .. import models` imports a module, too
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def test_the_import_reader_sees_relative_imports():
    names = imported_modules(ROOT / "trainer" / "config" / "tree.py")
    assert {"meshwright.sharding.config", "meshwright.models.config"} <= names
    assert {"pydantic.dataclasses", "meshwright.trainer.config.run"} <= names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_packages_import_only_what_stands_to_their_left(path):
    here = PACKAGES.index(path.relative_to(ROOT).parts[0])
    to_the_right = tuple(f"meshwright.{package}" for package in PACKAGES[here + 1 :])
    assert not {name for name in imported_modules(path) if name.startswith(to_the_right)}


@pytest.mark.parametrize("path", SOURCES + OUTSIDE, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_bare_package_import(path):
    assert not {name for name in imported_modules(path) if name.partition(".")[0] in PACKAGES}


def test_every_package_is_listed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = [path.parent.relative_to(ROOT) for path in ROOT.glob("[!.]*/**/__init__.py")]
    found = [folder for folder in found if folder.parts[0] != "build"]  # setuptools leaves it
    assert sorted(listed) == sorted(
        ["meshwright", *(f"meshwright.{'.'.join(f.parts)}" for f in found)]
    )


def test_every_folder_with_code_is_a_package():
    folders = {path.parent for path in SOURCES if "scripts" not in path.parts}
    assert all((folder / "__init__.py").is_file() for folder in folders)


WITHOUT_TESTS_OF_THEIR_OWN = {
    "models/batch.py",
    "models/config/mla.py",
    "models/config/model.py",
    "models/config/moe.py",
    "models/config/remat.py",
    "models/config/rope.py",
    "models/inputs.py",
    "models/layers/attention.py",
    "models/layers/sublayer.py",
    "models/layers/swiglu.py",
    "models/norms.py",
    "sharding/config.py",
    "sharding/exchange.py",
    "sharding/pipeline/orders.py",
    "sharding/taps.py",
    "sharding/traffic.py",
    "trainer/assembly.py",
    "trainer/checkpoint/layer_order.py",
    "trainer/config/checkpoint.py",
    "trainer/config/data.py",
    "trainer/config/device.py",
    "trainer/config/differences.py",
    "trainer/config/optimizer.py",
    "trainer/config/precision.py",
    "trainer/config/run.py",
    "trainer/config/tree.py",
    "trainer/data/shared.py",
    "trainer/inspect/traffic.py",
    "trainer/log/nonfinite.py",
    "trainer/microbatches.py",
    "trainer/runtime/compile_cache.py",
    "trainer/sampling.py",
}
"""Modules that other files' tests cover. The list only gets shorter: it may name no module that
has a test file of its own, and no module that is gone.
"""


def test_every_module_has_its_test_file():
    modules = [path.relative_to(ROOT) for path in SOURCES if path.name != "__init__.py"]
    modules = [module for module in modules if module.parts[0] != "scripts"]
    without = {
        str(module)
        for module in modules
        if not (ROOT / "tests" / module.parent / f"test_{module.name}").is_file()
    }
    assert not without - WITHOUT_TESTS_OF_THEIR_OWN, "write tests/…/test_….py beside the module"
    assert not WITHOUT_TESTS_OF_THEIR_OWN - without, "take these out of the list"


def test_what_answers_at_once_imports_no_jax():
    code = """
import sys
import meshwright, meshwright.models, meshwright.sharding, meshwright.trainer, meshwright.configs
import meshwright.models.config, meshwright.sharding.config, meshwright.trainer.config
import meshwright.trainer.cli
import meshwright.sharding.pipeline.load, meshwright.trainer.inspect.schedule
dir(meshwright), meshwright.load("tiny"), meshwright.Config, meshwright.__version__
slow = {"jax", "flax", "optax", "orbax", "matplotlib", "tokenizers", "chex"} & set(sys.modules)
assert not slow, slow
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_face_lists_what_it_has():
    assert set(meshwright.__all__) < set(dir(meshwright))
    assert all(callable(getattr(meshwright, name)) for name in meshwright.__all__)
    with pytest.raises(AttributeError, match="module 'meshwright' has no attribute 'trian'"):
        _ = meshwright.trian


@pytest.mark.slow
def test_wheel_holds_every_preset_and_module(tmp_path):
    copy = tmp_path / "copy"  # setuptools builds inside the tree
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "runs"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", tmp_path, copy], check=True)
    (wheel,) = tmp_path.glob("meshwright-*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    modules = [path for path in SOURCES if "scripts" not in path.parts]
    wanted = [*modules, *presets().values(), ROOT / "__init__.py"]
    assert {f"meshwright/{path.relative_to(ROOT)}" for path in wanted} <= held


def test_readme_lists_every_config_key():
    screen = (ROOT / "README.md").read_text(encoding="utf-8").partition("## The config on one")[2]
    written = [
        line for line in screen.partition("## Commands")[0].splitlines() if line[:4] == " " * 4
    ]
    tree = {}
    for line in written:
        if line[4] != " ":  # a section's first line; the others are indented further
            section = line.split()[0]
            tree[section] = []
        tree[section] += line.split()[line[4] != " " :]

    def keys(section, name):
        fields = section.__pydantic_fields__
        found = {name: list(fields)} if name else {}
        for key, field in fields.items():
            if dataclasses.is_dataclass(field.annotation) and name.count(".") < 1:
                found |= keys(field.annotation, f"{name}.{key}".lstrip("."))
        return found

    assert tree == keys(meshwright.Config, "")
