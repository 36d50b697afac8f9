# Gyre: the two commands are `make demo` and `make test`. Each does all its own set-up, and does it once.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
MINI := .venv-mini
SGLANG := .venv-sglang
HARBOR := .venv-harbor
MONITORS := .venv-monitors
DOCS := .venv-docs
PIP = $(1)/bin/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS)
ENGINE ?= embedded
JOBS ?= 2
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1

.PHONY: help demo test setup lint types imports unit system clean test-megatron test-sglang test-environments test-harbor test-faults test-chaos test-harness test-ray test-viewer screenshots test-monitors docs

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

demo: setup $(MINI)/.done $(if $(filter sglang,$(ENGINE)),$(SGLANG)/.done) ## a real model, harness, sandbox and two training steps, in a few minutes (ENGINE=sglang for the real SGLang server)
	$(BIN)/gyre demo --engine $(ENGINE) --harness-venv $(MINI) --sglang-venv $(SGLANG)

test: setup lint types imports unit ## linters, types, import borders and the fast test suite

setup: system $(VENV)/.done ## virtual environment with everything that the demo and the tests need

system:
	@scripts/system-packages.sh

$(VENV)/.done: pyproject.toml constraints.txt
	@scripts/check-python.sh "$(PYTHON)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing Gyre and its libraries into $(VENV) (once; a few minutes)"
	@$(call PIP,$(VENV)) -c constraints.txt -e '.[backend,megatron,mooncake,export,otel,plot,dev]'
	@touch $@

$(MINI)/.done: constraints-mini.txt
	@test -x $(MINI)/bin/python || $(PYTHON) -m venv $(MINI)
	@echo "installing mini-swe-agent, unmodified, into $(MINI) (once)"
	@$(call PIP,$(MINI)) -c constraints-mini.txt mini-swe-agent
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

unit: setup
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup

test-megatron: setup ## Megatron-core and FSDP2 on several gloo processes
	$(BIN)/python -m pytest -q -m megatron tests/megatron

test-sglang: setup $(SGLANG)/.done ## the engine contract against a real SGLang server on the CPU (2.6 GB)
	GYRE_SGLANG_VENV=$(SGLANG) $(BIN)/python -m pytest -q -m sglang tests/engines

test-environments: setup ## hack fixtures, and oracle = 1 / empty = 0 for packages from PyPI (long; stopped, it goes on where it was)
	@mkdir -p .cache
	GYRE_RESUME=.cache/environments-passed $(BIN)/python -m pytest -v -m environments -o console_output_style=count -n $(JOBS) tests/environments
	@rm -f .cache/environments-passed

test-harbor: setup $(HARBOR)/.done ## the real Harbor: its trials in our sandboxes, its agents against our gateway, ATIF (a Python 3.12 or newer)
	GYRE_HARBOR_PYTHON=$(CURDIR)/$(HARBOR)/bin/python $(BIN)/python -m pytest -v -m harbor tests

$(HARBOR)/.done: pyproject.toml constraints-harbor.txt
	@test -x $(HARBOR)/bin/python || "$$($(BIN)/python -c 'from gyre_sdk.environments.pythons import main; main(["3.12", "3.13", "3.14"])')" -m venv $(HARBOR)
	@echo "installing Harbor, unmodified, into $(HARBOR) (once; 500 MB)"
	@$(call PIP,$(HARBOR)) -c constraints-harbor.txt -e '.[harbor]'
	@touch $@

test-faults: setup ## kill -9, slow and full disks
	$(BIN)/python -m pytest -q -m faults tests

test-chaos: setup ## kills and stalls of every process during training
	$(BIN)/python -m pytest -q -m chaos tests

test-harness: setup $(MINI)/.done ## real harness CLIs from npm and PyPI, each through every fault, in loopback-only sandboxes (Node 20, root)
	$(BIN)/python scripts/install-harnesses.py
	$(BIN)/python -m pytest -v -m harness -o console_output_style=count tests/harness

test-viewer: setup ## the viewer in headless Chromium, and screenshots for the documentation
	@scripts/chromium.sh
	@$(call PIP,$(VENV)) -c constraints.txt -e '.[viewer-tests]'
	$(BIN)/python -m pytest -q -m viewer tests/viewer

screenshots: setup ## the pictures of docs/viewer.md, made anew
	@scripts/chromium.sh
	@$(call PIP,$(VENV)) -c constraints.txt -e '.[viewer-tests]'
	$(BIN)/python scripts/screenshots.py docs/img

test-monitors: system $(MONITORS)/.done ## TensorBoard, W&B (offline), trackio; exports read by pandas, polars, duckdb, datasets
	PYTHONPATH=. HF_HUB_OFFLINE=1 $(MONITORS)/bin/python -m pytest -q -m monitors tests/monitors tests/exporters

$(MONITORS)/.done: pyproject.toml constraints-monitors.txt
	@scripts/check-python.sh "$(PYTHON)"
	@test -x $(MONITORS)/bin/python || $(PYTHON) -m venv $(MONITORS)
	@$(call PIP,$(MONITORS)) -c constraints-monitors.txt -e '.[export,otel,plot,tensorboard,wandb,trackio,readers]'
	@touch $@

docs: $(DOCS)/.done ## the documentation as a site in site/, built strictly: no broken link, no undocumented reference
	$(DOCS)/bin/python scripts/docs.py

$(DOCS)/.done: constraints-docs.txt
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	@$(call PIP,$(DOCS)) -r constraints-docs.txt
	@touch $@

test-ray: setup ## cells on a two-node Ray cluster on this machine
	@$(call PIP,$(VENV)) -c constraints.txt -e '.[ray]'
	$(BIN)/python -m pytest -q -m ray tests

$(SGLANG)/.done: $(VENV)/.done
	$(BIN)/python -m gyre_backend.engines.sglang_cpu install $(SGLANG)
	@touch $@

clean: ## remove the virtual environments and caches of this checkout (runs are kept)
	rm -rf $(VENV) $(MINI) .venv-* .harness .mypy_cache .ruff_cache .import_linter_cache .hypothesis
