# A newcomer needs two of these: `make train` and `make test`. Each does its own set-up.
#
#   PYTHON=python3.12   the Python to use (default: the first of python3, python3.13 ... that will do)
#   VENV=none           use PYTHON as it is, with the packages it has, and download nothing
#   CUDA=1              demand the CUDA extension (default: where a GPU and nvcc are there); 0 leaves it out
#   JOBS=4              tests at once (default: as cores and memory allow, tests/conftest.py)
#   ARGS='...'          more arguments for the training script, or for pytest

VENV ?= .venv
CUDA ?= AUTO
JOBS ?= auto
ARGS ?=

CPP := $(shell find cpp -type f)
CLANG_FORMATTED := $(filter %.h %.cc %.cu %.cuh,$(CPP))

# --- Which Python, which extras, where things go ---------------------------------------------------------------------

SUITABLE := import sys; sys.exit(sys.version_info < (3, 11))
ifndef PYTHON
  PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11; do \
    $$p -c 'import ensurepip, venv; $(SUITABLE)' 2>/dev/null && echo $$p && break; done)
endif

ifeq ($(VENV),none)
  PY := $(PYTHON)
  BIN :=
  STATE := build/none
else
  PY := $(VENV)/bin/python
  BIN := $(VENV)/bin/
  STATE := $(VENV)/make
endif

GPU :=
ifeq ($(CUDA),AUTO)
  GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q 'GPU 0' && { command -v nvcc || echo "$$CUDACXX"; })
else ifneq ($(filter $(CUDA),1 ON),)
  override CUDA := ON
  GPU := demanded
else ifneq ($(filter $(CUDA),0 OFF),)
  override CUDA := OFF
else
  $(error CUDA: expected 1, 0 or AUTO, got '$(CUDA)')
endif
EXTRAS := test examples $(if $(GPU),cuda13)
SETTINGS := $(PYTHON) $(CUDA) $(EXTRAS)

# --- What people type ------------------------------------------------------------------------------------------------

.PHONY: train test lint format clean help FORCE
.DELETE_ON_ERROR:

train: $(STATE)/built  ## train a small GPT in FP8 and in ordinary precision; table and picture at the end
	$(PY) examples/train_gpt.py $(ARGS)

test: $(STATE)/built  ## run the test suite
	$(PY) -m pytest $$($(PY) -c 'import xdist' 2>/dev/null && echo '-n $(JOBS) --dist worksteal') $(ARGS)

build: $(STATE)/built  ## the environment and the compiled extension, nothing else
.PHONY: build

lint: $(STATE)/packages  ## check style and format of Python and C++
	$(BIN)ruff check
	$(BIN)ruff format --check
	$(BIN)clang-format --dry-run -Werror $(CLANG_FORMATTED)

format: $(STATE)/packages  ## bring Python and C++ into the project's format
	$(BIN)ruff check --fix
	$(BIN)ruff format
	$(BIN)clang-format -i $(CLANG_FORMATTED)

clean:  ## remove all that make has made: builds, caches and .venv
	rm -rf build dist .venv .pytest_cache .ruff_cache .hypothesis
	find benchmarks cpp examples tests transformer_engine_jax -name __pycache__ -prune -exec rm -rf {} +

help:  ## this list
	@awk -F ':.*##' '/^[a-z]+:.*##/ { printf "%-12s%s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@sed -n 's/^#   /   /p' $(firstword $(MAKEFILE_LIST))

# --- Set-up: an environment, its packages, the compiled extension; each again only when what it is made from changes -----

# An environment keeps the Python that it was made with; asking for another one must not pass unnoticed.
MINOR := import sys; print(*sys.version_info[:2], sep=".")
SAME_PYTHON = test ! -x $(PY) || test "$$($(PY) -c '$(MINOR)')" = "$$($(PYTHON) -c '$(MINOR)')" || { \
  echo "make: $(VENV) has another Python than $(PYTHON); name another one too, such as VENV=.venv-$$($(PYTHON) -c '$(MINOR)')" >&2; \
  exit 1; }

$(STATE)/settings: FORCE
	@$(or $(PYTHON),false) -c '$(SUITABLE)' 2>/dev/null || { \
	  echo "make: this needs Python 3.11 or newer with its venv module; found $(or $(PYTHON),none)." \
	    "Name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(if $(filter command environment,$(firstword $(origin PYTHON))),@$(SAME_PYTHON))
	@mkdir -p $(@D)
	@echo '$(SETTINGS)' | cmp -s - $@ || echo '$(SETTINGS)' > $@

# The packages that pyproject.toml names for building, running and the extras. Built is with the jaxlib that runs, and so
# not in isolation, for which pyproject.toml names the oldest.
REQUIREMENTS := import tomllib, sys; p = tomllib.load(open("pyproject.toml", "rb")); \
  extras = p["project"]["optional-dependencies"]; \
  print(*(r for r in p["build-system"]["requires"] if not r.startswith("jaxlib")), *p["project"]["dependencies"], *sum((extras[e] for e in sys.argv[1:]), []), sep="\n")
BUILD_TOOLS := from scikit_build_core.build import get_requires_for_build_editable as f; print(*f(), sep="\n")

ifeq ($(VENV),none)
$(STATE)/packages: pyproject.toml $(STATE)/settings
	@touch $@
else
$(STATE)/packages: pyproject.toml $(STATE)/settings
# Without pip where it was interrupted; making it again completes it.
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@$(PY) -c '$(REQUIREMENTS)' $(EXTRAS) > $(STATE)/requirements.txt
	@echo "setting up $(VENV) with $$($(PYTHON) -V): packages (once; takes a minute or so)"
	$(PY) -m pip install --quiet -r $(STATE)/requirements.txt
# For its headers, hence without what it would bring.
	$(if $(GPU),$(PY) -m pip install --quiet --no-deps 'nvidia-cudnn-frontend>=1.32')
	@$(PY) -c '$(BUILD_TOOLS)' > $(STATE)/tools.txt
	@test ! -s $(STATE)/tools.txt || $(PY) -m pip install --quiet -r $(STATE)/tools.txt
	@touch $@
endif

$(STATE)/built: $(STATE)/packages CMakeLists.txt $(CPP)
	$(PY) -m pip install --quiet --no-build-isolation --no-deps --config-settings=cmake.define.TE_CUDA=$(CUDA) -e .
	@touch $@
