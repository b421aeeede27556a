#!/usr/bin/env bash
# Format, lint, types and import order: what CI runs before the tests.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
export PYRIGHT_PYTHON_IGNORE_WARNINGS=1 # it would ask the network for its newest version

"$venv/bin/ruff" format --check .
"$venv/bin/ruff" check .
"$venv/bin/pyright" --pythonpath "$venv/bin/python"
"$venv/bin/python" -m pytest -q tests/test_structure.py
