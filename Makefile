# Set-up, checks and tests of Weft. `make help` lists the targets.
#
# Every target first creates the environment: .venv, with the exact versions of constraints.txt. It is created again
# only when pyproject.toml or constraints.txt changes.
#
#   make test PYTHON=python3.11            use another interpreter for a new .venv
#   make test ARGS="tests/cache -k fork"   pass arguments to pytest, or to each benchmark

VENV := .venv
BIN := $(VENV)/bin
# Interpreters to try, first to last; the one that fits `requires-python` is used.
PYTHON ?= python3 python3.11 python
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install --quiet -c constraints.txt
LIBRARY := weft/kernels/cpu/_weft_cpu.so
SHIM := weft/programs/sandbox/_weft_shim.so
ARGS ?=
# Processes that run the tests; each uses one torch thread.
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help install check test soak demo bench format clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/.kernels ## make .venv and install everything into it

check: install ## ruff, formatting, mypy strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: install ## run the tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

soak: install ## run the long tests: random kills, tens of thousands of rows, proofs
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m soak $(ARGS)

demo: install ## start a server and drive it with the openai client
	@$(BIN)/python -m demo.run

bench: install ## measure this machine, with the model in the package
	@$(BIN)/weft bench throughput $(ARGS)
	@$(BIN)/weft bench latency $(ARGS)
	@$(BIN)/weft bench serve $(ARGS)

format: install ## rewrite the code as `make check` wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment, caches and build outputs
	rm -rf $(VENV) $(LIBRARY) $(SHIM) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch is installed first and alone: a looser requirement of another package could select another build of it.
$(VENV)/.installed: $(VENV)/.made pyproject.toml setup.py constraints.txt $(wildcard weft/kernels/cpu/src/*)
	@echo "Installing into $(VENV); the first time this downloads torch and takes a few minutes."
	@$(PIP) "$$(grep '^torch==' constraints.txt)" setuptools
	@$(PIP) --no-build-isolation -e '.[dev]'
	@touch $@

# Installing compiles the kernels if there is a C++ compiler; so does a change of their sources.
$(VENV)/.kernels: $(VENV)/.installed $(wildcard weft/kernels/cpu/src/*) weft/programs/sandbox/src/shim.c
	@if [ ! -e $(LIBRARY) ] || [ -n "$$(find $(dir $(LIBRARY))src -newer $(LIBRARY))" ]; then \
	  $(BIN)/python -m weft.kernels.cpu.build || true; \
	fi
	@if [ ! -e $(SHIM) ] || [ weft/programs/sandbox/src/shim.c -nt $(SHIM) ]; then \
	  $(BIN)/python -m weft.programs.sandbox.build_shim || true; \
	fi
	@touch $@

$(VENV)/.made:
	@for python in $(PYTHON); do \
	  if $$python -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 12))' 2>/dev/null; then \
	    echo "Making $(VENV) with $$($$python --version)"; \
	    $$python -m venv $(VENV) && touch $@; exit; \
	  fi; \
	done; \
	echo "No Python that fits: Weft needs 3.11 with the venv module; tried: $(PYTHON)." >&2; \
	echo "Install one (on Debian and Ubuntu also python3-venv), or name it: make PYTHON=/path/to/python3.11" >&2; \
	exit 1
