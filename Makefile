# Each target sets itself up from a bare clone: it finds a Python >= 3.12, makes .venv
# and installs what it needs, once. Needs make and git; no other tools.

VENV := .venv
BIN := $(VENV)/bin
CANDIDATES := python3.14 python3.13 python3.12 python3 python \
	$(wildcard $(HOME)/.pyenv/versions/3.1[2-9]*/bin/python)
# The Python of an environment that is still to be made, as in PY=3.13.
PY ?=
JOBS ?= 2
# What the benchmarks need: with an NVIDIA GPU, jax for it (BENCH=test,cuda12 for an older one).
BENCH ?= test$(if $(shell command -v nvidia-smi 2>/dev/null),$(comma)cuda13)
comma := ,

.PHONY: help chat demo quick test real mutants bench docs browser check format wheel-check lane-oldest lane-measured lane-newest \
	lane-gpus lanes ci clean

help:
	@echo "make chat    chat with SmolLM2-135M-Instruct, a download of 93 MB; ARGS='--model FOLDER' for another"
	@echo "make demo    serve a small hybrid model, compare it with the model without a cache"
	@echo "make quick   lint, types and the quick tests, in a minute"
	@echo "make test    lint, types, all tests and notebooks; needs no GPU"
	@echo "make mutants mutation testing of the lines changed since main; ARGS=tests/test_blocks.py"
	@echo "make real    compare SmolLM2's tokens with those of transformers; downloads what make chat does"
	@echo "make bench   time the block manager, steps, kernels, planner; ARGS='zero copies' for some"
	@echo "make docs    the site: guides, a page for every public name, benchmarks"
	@echo "make browser the site, looked at in a headless Chromium: links, widths, search"
	@echo "make check   lint and types only"
	@echo "make format  rewrite the code in the project's format"
	@echo "make lanes   all tests on the built wheel: oldest, measured and newest Python and jax"
	@echo "make lane-gpus    compile the kernels for GPUs from Ampere to Blackwell; needs no GPU"
	@echo "make wheel-check PY=3.13 WITH='jax==0.11.2'  the same on a Python and packages of yours"
	@echo "make ci      test, lanes and browser: all that has to pass"

chat: $(VENV)/.chat
	@$(BIN)/python notebooks/chat.py $(ARGS)

demo: $(VENV)/.demo
	@$(BIN)/python -m jaxkv demo $(ARGS)

# Units and properties of the host's packages, and one kernel in interpret mode.
QUICK := $(patsubst %,tests/test_%.py,architecture specs layout planning grouping choice hf_config \
	blocks prefixes prefix_keys prefix_lookup prefix_events offload shape_buckets \
	scheduler scheduler_prefixes) tests/kernels/test_block_kernels.py

quick: check
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(QUICK) $(ARGS)

real: $(VENV)/.test $(VENV)/.chat
	@$(BIN)/python -m pytest -o faulthandler_timeout=0 tests/real_model.py $(ARGS)

mutants: $(VENV)/.mutants
	@$(BIN)/python .ci/mutants.py $(or $(ARGS),$(QUICK))

test: check
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

bench: $(VENV)/.$(BENCH)
	@$(BIN)/python -m tests.benchmarks $(ARGS)

docs: $(VENV)/.docs
	@rm -rf build/docs
	@$(BIN)/python -m sphinx -q -W --keep-going -E -j $(JOBS) -b html .docs build/docs
	@echo "build/docs/index.html"

browser: docs $(VENV)/.browser
	@$(BIN)/python .ci/browser.py

check: $(VENV)/.test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyrefly check --summarize-errors

format: $(VENV)/.test
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/python notebooks/execute.py --layout

# The oldest that pyproject.toml allows, what the figures in README.md come from, the newest.
LANES := lane-oldest lane-measured lane-newest
lane-oldest: PY := 3.12
lane-oldest: WITH := jax==0.10.2 numpy==2.0.2
lane-measured: PY := 3.12
lane-measured: WITH := jax==0.11.2
lane-newest: PY := 3.13

wheel-check $(LANES): $(VENV)/.test
	@JOBS=$(JOBS) PYTHON=$(BIN)/python .ci/wheel-check "$(PY)" $(WITH)

# One compiler and no libraries: what is compiled does not run.
GPUS := $(VENV)-gpus
lane-gpus: $(GPUS)/.made
	@$(GPUS)/bin/python -m pytest -n $(JOBS) -o faulthandler_timeout=0 tests/kernels/test_gpu_targets.py $(ARGS)

$(GPUS)/.made: $(BIN)/python pyproject.toml
	@echo "installing jaxkv and compilers for GPUs into $(GPUS)"
	@$(BIN)/python -m venv $(GPUS)
	@$(GPUS)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[testing]" \
		pytest pytest-xdist
	@jax=$$($(GPUS)/bin/python -c 'import jax; print(jax.__version__)'); \
		$(GPUS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		"jax-cuda13-plugin==$$jax" "jax-cuda13-pjrt==$$jax" nvidia-cuda-nvcc
	@touch $@

lanes: $(LANES) lane-gpus

ci: test lanes browser

clean:
	rm -rf $(VENV) $(VENV)-gpus build dist

# A stamp per extra, so that a second run installs nothing.
$(VENV)/.%: $(BIN)/python pyproject.toml
	@echo "installing jaxkv[$*] into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$*]"
	@touch $@

$(BIN)/python:
	@for python in $(CANDIDATES); do \
		if $$python -c 'import ensurepip, sys; found = sys.version_info; sys.exit( \
			found < (3, 12) or "$(PY)" not in ("", "%d.%d" % found[:2]))' 2>/dev/null; \
		then $$python -m venv $(VENV) && exit 0; rm -rf $(VENV); fi; \
	done; \
	echo "jaxkv needs Python $(or $(PY),3.12 or newer) with pip and venv: install one on PATH" >&2; \
	exit 1
