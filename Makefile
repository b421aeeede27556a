# Needs Python 3.11 or newer and make; everything else is installed into .venv.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
INSTALLED := $(VENV)/installed

.PHONY: train test check clean

train: $(INSTALLED) ## train the tiny preset; ARGS="mesh.tensor=4 train.steps=50" overrides it
	$(VENV)/bin/meshwright train tiny $(ARGS)

test: $(INSTALLED) ## ARGS="-m 'not slow'" or a path narrows it
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal $(ARGS)

check: $(INSTALLED) ## format, lint, types, import order
	VENV=$(VENV) scripts/check.sh

clean:
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Again only when one of the two files has changed.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@
