# The commands of the project. `make` alone lists them.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/pip --disable-pip-version-check --quiet install --constraint constraints.txt
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest
# Tests with simulated GPUs must not meet a real one, and processes that have met one cannot be forked.
WITHOUT_GPU := CUDA_VISIBLE_DEVICES= $(PYTEST)
# Without bytecode on disk, every process of the tests compiles the package and the tests anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test check test-all test-gpu test-browser bench docs format clean

help:  ## list the commands
	@echo "make COMMAND, where COMMAND is one of"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	@echo "[1/4] virtual environment in $(VENV), with $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "ferrite needs Python 3.10 or newer: make PYTHON=/path/to/python3")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "[2/4] torch, as pinned in constraints.txt (the largest download)"
	@$(PIP) setuptools torch
	@echo "[3/4] what the tests, benchmarks and checks need"
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@echo "[4/4] a look at this machine"
	@$(BIN)/python -m ferrite doctor
	@touch $@

demo: $(READY)  ## compile a real model and show it equal to eager
	@$(BIN)/python -m ferrite demo

test: $(READY)  ## everything CI runs: format, lint, types, tests
	@$(MAKE) --no-print-directory style
	@$(MAKE) --no-print-directory -j 2 types daily

check: $(READY)  ## format, lint, types and the quick tests; run it before every commit
	@$(MAKE) --no-print-directory style
	@$(MAKE) --no-print-directory -j 2 types quick

test-all: $(READY)  ## also the long sweeps
	@$(MAKE) --no-print-directory lint
	$(WITHOUT_GPU) -n $(WORKERS) --dist loadfile -m "not gpu"
	$(WITHOUT_GPU) -n $(WORKERS) --dist loadfile -m "not gpu" --executor interpreter tests/contract tests/models
	$(WITHOUT_GPU) -n $(WORKERS) --dist loadfile -m "not gpu" --check-bounds tests/contract tests/models tests/lower tests/fuzz

test-gpu: $(READY)  ## the tests that need a GPU
	$(PYTEST) -n $(WORKERS) -m "gpu and not slow"
	$(PYTEST) -n $(WORKERS) -m "not slow and not lengthy" --device cuda tests/contract

test-browser: $(READY)  ## the page of a report in a real browser: needs chromium and chromium-driver
	@$(PIP) --no-build-isolation --editable '.[browser]'
	$(WITHOUT_GPU) -m browser -rs tests/reports

bench: $(READY)  ## measure for a few minutes, and draw bench/results/short/
	$(BIN)/python -m bench

docs: $(READY)  ## make the generated pages anew
	$(BIN)/python -m ferrite options --markdown > docs/options.md
	$(BIN)/python -m ferrite.passes.page docs/names.csv > docs/passes.md
	$(BIN)/python -m ferrite ops --markdown docs/operators.csv > docs/operators.md

.PHONY: lint style types quick daily
lint: style types

style: $(READY)
	@echo "format, lint"
	@$(BIN)/ruff format --check --quiet . || { echo "not formatted: make format"; exit 1; }
	@$(BIN)/ruff check --quiet .

types: $(READY)
	@echo "types"
	@$(BIN)/mypy --no-error-summary

quick: $(READY)
	$(WITHOUT_GPU) -n $(WORKERS) --dist loadfile -m "quick and not lengthy and not slow and not gpu"

daily: $(READY)
	$(WITHOUT_GPU) -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow and not gpu"

format: $(READY)  ## format the code
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format .

clean:  ## remove the virtual environment and what tools left behind
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
