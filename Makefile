# Each target sets up .venv first, so that `make demo` or `make test` is all that a fresh clone needs.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.PHONY: help venv demo demo-grpo demo-offload test test-quick exhaustive oldest quality docs docs-check style clean

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := recipes/demo/sft/config_demo.yaml
DEMO_WEAK := recipes/demo/grpo/config_sft_weak.yaml
DEMO_GRPO := recipes/demo/grpo/config_demo.yaml
NUM_PROCESSES ?= 2
# Of make demo-offload: a folder on a local disk.
DISK ?= /var/tmp
PYTEST ?= # options for pytest
# What a change to the engine breaks first, in seconds: parameters and gradients read outside of their module, norms.
QUICK_RANKS := $(addprefix tests/ranks/test_, guard.py grad_norm.py two_optimizers.py buffers.py)

# Launched scripts start `python` and `accelerate` by name, so the environment's folder comes first.
export PATH := $(abspath $(BIN)):$(PATH)

help:
	@echo "make demo     train a small model under ZeRO-3, save it, check it in a plain process"
	@echo "make demo-grpo  train a weak model, then improve it by reinforcement learning under ZeRO-3"
	@echo "make demo-offload  train the demo's model with state in memory and on disk, and compare"
	@echo "make test     run all tests; make test-quick those of a minute, make exhaustive the long forms of some"
	@echo "make docs     build the documentation site into outputs/site, and fail at every warning"
	@echo "make oldest   run the tests of the libraries with the oldest releases that are supported"
	@echo "make quality  check style, types and generated pages; make style fixes the style"
	@echo "make clean    remove what demo and tests wrote (the environment stays)"

venv: $(STAMP)

$(STAMP): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("hf_zero needs Python 3.10 or newer, this is " + sys.version.split()[0] \
	    + ": try make PYTHON=python3.12" if sys.version_info < (3, 10) else 0)'
	@$(PYTHON) -m venv $(VENV) || { echo "No virtual environment: on Debian or Ubuntu install python3-venv." >&2; exit 1; }
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python scripts/prepare_demo.py --config $(DEMO)
	$(BIN)/accelerate launch --config_file recipes/accelerate_configs/zero3.yaml \
	    --num_processes $(NUM_PROCESSES) scripts/sft.py --config $(DEMO)
	$(BIN)/python scripts/evaluate_arithmetic.py --config $(DEMO)

demo-offload: $(STAMP)
	$(BIN)/python scripts/prepare_demo.py --config $(DEMO)
	$(BIN)/python scripts/demo_offload.py --config $(DEMO) --disk $(DISK) --num_processes $(NUM_PROCESSES)

demo-grpo: $(STAMP)
	$(BIN)/python scripts/prepare_demo.py --config $(DEMO)
	$(BIN)/python scripts/prepare_demo_grpo.py --config $(DEMO_WEAK) --source outputs/demo/data
	$(BIN)/accelerate launch --config_file recipes/accelerate_configs/zero2.yaml \
	    --num_processes $(NUM_PROCESSES) --mixed_precision no scripts/sft.py --config $(DEMO_WEAK)
	$(BIN)/python scripts/evaluate_arithmetic.py --config $(DEMO_WEAK)
	$(BIN)/accelerate launch --config_file recipes/accelerate_configs/zero3.yaml \
	    --num_processes $(NUM_PROCESSES) --mixed_precision no scripts/grpo.py --config $(DEMO_GRPO)
	$(BIN)/python scripts/evaluate_arithmetic.py --config $(DEMO_GRPO)

# $(call beside,ONE,OTHER): pytest of both side by side, as most tests with ranks leave cores idle while they wait. The
# output of ONE comes last.
define beside
@log=$$(mktemp); trap 'rm -f $$log' EXIT; status=0; \
	$(BIN)/python -m pytest $(1) > $$log 2>&1 & one=$$!; \
	$(BIN)/python -m pytest $(2) || status=$$?; \
	wait $$one || status=$$?; cat $$log; exit $$status
endef

test: $(STAMP)
	$(call beside,$(PYTEST) tests/ranks,$(PYTEST) tests/arithmetic tests/integration tests/launch)

QUICK := -m "not slow and not exhaustive"

test-quick: $(STAMP)
	$(call beside,$(QUICK) tests/arithmetic/test_[p-z]*.py $(QUICK_RANKS),$(QUICK) tests/arithmetic/test_[!p-z]*.py)

exhaustive: $(STAMP)
	$(BIN)/python -m pytest -m exhaustive

# The oldest releases that are supported, in an environment of their own.
oldest: $(VENV)-oldest/.installed
	$(VENV)-oldest/bin/python -m pytest $(PYTEST) tests/arithmetic tests/integration

$(VENV)-oldest/.installed: setup.cfg pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install -c constraints-oldest.txt -e '.[trl,peft,math,plot]' \
	    hypothesis pytest pytest-timeout
	@touch $@

quality: $(STAMP) docs-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy

# The parity tables are measured, not checked here: `python -m benchmarks.parity_report docs/parity.md` takes minutes.
docs: $(STAMP)
	$(BIN)/mkdocs build --strict

docs-check: $(STAMP)
	$(BIN)/python -m hf_zero.config.reference docs/configuration.md --check
	$(BIN)/python -m benchmarks.version_table docs/installation.md --check

style: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf outputs build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find hf_zero scripts recipes benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +
