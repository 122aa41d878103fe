# Each target sets itself up from a bare clone: it finds a Python >= 3.12, makes .venv
# and installs what it needs, once. Needs make and git; no other tools.

VENV := .venv
BIN := $(VENV)/bin
CANDIDATES := python3.14 python3.13 python3.12 python3 python \
	$(wildcard $(HOME)/.pyenv/versions/3.1[2-9]*/bin/python)
JOBS ?= 2
# What the benchmarks need: with an NVIDIA GPU, jax for it (BENCH=test,cuda12 for an older one).
BENCH ?= test$(if $(shell command -v nvidia-smi 2>/dev/null),$(comma)cuda13)
comma := ,

.PHONY: help demo test bench check format clean

help:
	@echo "make demo    serve a small hybrid model from one paged pool"
	@echo "make test    lint, types and the whole test suite"
	@echo "make bench   time kernels, steps and planner on the device that is there"
	@echo "make check   lint and types only"
	@echo "make format  rewrite the code in the project's format"

demo: $(VENV)/.demo
	@$(BIN)/python -m jaxkv demo $(ARGS)

test: check
	@$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

bench: $(VENV)/.$(BENCH)
	@$(BIN)/python -m tests.benchmarks $(ARGS)

check: $(VENV)/.test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyrefly check --summarize-errors

format: $(VENV)/.test
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) demo_output

# A stamp per extra, so that a second run installs nothing.
$(VENV)/.%: $(BIN)/python pyproject.toml
	@echo "installing jaxkv[$*] into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$*]"
	@touch $@

$(BIN)/python:
	@for python in $(CANDIDATES); do \
		if $$python -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; \
		then $$python -m venv $(VENV) && exit 0; rm -rf $(VENV); fi; \
	done; \
	echo "jaxkv needs Python 3.12 or newer with pip and venv: install one on PATH" >&2; exit 1
