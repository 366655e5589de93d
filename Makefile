# Two commands do everything on a machine that has Python 3.10 or newer and make:
#   make demo   environment, install, main job
#   make test   environment, install, all tests

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TESTS ?= tests
PYTEST_FLAGS ?= -n 2 --dist loadfile

# One thread a process: every test of several ranks runs that many processes on these cores.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test matrix lint format check coverage wheel clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

# A stamp for each set of packages: nothing is installed again until pyproject.toml changes.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable . --config-settings editable_mode=compat
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[test]' --config-settings editable_mode=compat
	@touch $(VENV)/.installed $@

setup: $(VENV)/.installed-test  ## environment with everything for development

demo: $(VENV)/.installed  ## the main job, from nothing: a small GPT on one process and on four
	$(BIN)/autoshard demo

test: $(VENV)/.installed-test  ## all tests
	$(BIN)/python -m pytest $(PYTEST_FLAGS) $(TESTS)

matrix: $(VENV)/.installed-test  ## every tiny model under every configuration: the long form of tests/test_equality.py
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "" tests/test_equality.py

golden: $(VENV)/.installed-test  ## emitted texts under review, written anew: read the diff
	$(BIN)/python -m pytest tests/test_golden.py --update-golden

lint: $(VENV)/.installed-test  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-test  ## ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint test  ## what .ci/run asks of a change, without the wheel

coverage: $(VENV)/.installed-test  ## tests with a coverage table (one process: slower)
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(TESTS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

wheel: $(VENV)/.installed  ## build dist/autoshard-*.whl
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:  ## everything that make made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
