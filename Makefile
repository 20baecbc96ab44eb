# Every target works as the first command in a fresh clone on a CPU machine with Python 3.11 or newer.
#   make demo     build an engine and artifacts from the example documents, answer a question in both arms
#   make test     every check: style, types, tests          make lint     style and types only
#   make format   rewrite sources in the project's style    make venv     the environment only
#   make plugins  build the CUDA and TensorRT libraries     make clean    remove what the targets made
#   make lock     write requirements/constraints.txt from the environment
#   make tools    build the CUDA libraries for compute-sanitizer, in build/tools/lib
# Settings: PYTHON (interpreter that makes the environment), VENV (where it goes), TEST_WORKERS, PYTEST_ARGS.
# Where nvcc is, make test compiles the libraries too, beside the installation and the checks of style and types, which
# keep one core busy each.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# Compiled modules are kept whatever the environment says: every rank of every test would compile them again.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?=
VENV ?= .venv
TEST_WORKERS ?= 2
PYTEST_ARGS ?=

BIN := $(VENV)/bin
REQUIREMENTS := requirements/runtime.txt requirements/test.txt requirements/constraints.txt requirements/plugins.txt \
  requirements/tensorrt.txt requirements/typings.txt requirements/repair_typings.py requirements/triton.txt \
  requirements/triton_python.txt requirements/arrange_triton.py
# The stamp names the content of everything the environment is made from, so that a changed pin makes it anew.
CONTENT := $(shell cat $(REQUIREMENTS) pyproject.toml setup.py | cksum | tr ' ' '-')
STAMP := $(VENV)/.installed-$(CONTENT)
# What setup.py needs is there first, so that the kernels compile while the rest is installed.
TOOLS := $(VENV)/.tools-$(CONTENT)
# What is used of the packages is compiled at its first import, which is at the end of the installation.
PIP := "$(BIN)/python" -m pip install --no-compile --quiet --disable-pip-version-check
SOURCES := trt_redknot tests examples run benches triton build_engine.py setup.py
PRESENT = $(wildcard $(SOURCES))
TYPED = trt_redknot $(wildcard build_engine.py run/*.py examples/*.py examples/*/*.py)
CUDA_SOURCES = $(shell find plugins -type f \( -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.h' -o -name '*.hpp' \) 2>/dev/null)

.PHONY: help demo test lint format venv plugins tools kernels compiled lock clean

help:
	@sed -n '2,8s/^# \{0,1\}//p' Makefile

demo: venv
	@$(BIN)/python run/demo.py

test:
	@$(MAKE) --jobs=2 lint compiled
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations=20 $(PYTEST_ARGS)

lint: venv
	@echo "ruff check";  $(BIN)/ruff check $(PRESENT)
	@echo "ruff format"; $(BIN)/ruff format --check $(PRESENT)
	@echo "mypy";        MYPYPATH="$(VENV)/typings" $(BIN)/mypy $(TYPED)
ifneq ($(CUDA_SOURCES),)
	@echo "clang-format"; $(BIN)/clang-format --dry-run --Werror $(CUDA_SOURCES)
else
	@echo "clang-format: no C++ or CUDA sources under plugins/"
endif

format: venv
	@$(BIN)/ruff check --fix $(PRESENT); $(BIN)/ruff format $(PRESENT)
ifneq ($(CUDA_SOURCES),)
	@$(BIN)/clang-format -i $(CUDA_SOURCES)
endif

venv: $(STAMP)

$(TOOLS):
	@python="$(PYTHON)"; \
	if [[ -z "$$python" ]]; then \
	  for candidate in python3 python3.11 python3.12 python3.13 python3.14; do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python="$$candidate"; break; fi; \
	  done; \
	fi; \
	if [[ -z "$$python" ]]; then \
	  echo "error: no Python 3.11 or newer on PATH, found $$(python3 --version 2>&1 || echo none). Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 2; \
	fi; \
	if ! "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	  echo "error: $$python is not Python 3.11 or newer. Name another: make PYTHON=/path/to/python3.11" >&2; exit 2; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "error: $$python cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; \
	fi; \
	if [[ ! -x "$(BIN)/python" ]]; then echo "making $(VENV) with $$("$$python" --version)"; "$$python" -m venv "$(VENV)"; fi; \
	if command -v nvcc >/dev/null; then $(PIP) setuptools -c requirements/constraints.txt; fi; \
	rm -f "$(VENV)"/.tools-*; touch "$(TOOLS)"

$(STAMP): | $(TOOLS)
	@echo "installing the pinned requirements into $(VENV)"; \
	$(PIP) -r requirements/runtime.txt -r requirements/test.txt -c requirements/constraints.txt; \
	if command -v nvcc >/dev/null; then $(PIP) --no-deps -r requirements/plugins.txt; fi; \
	$(PIP) --no-deps -r requirements/tensorrt.txt || echo "TensorRT for RTX cannot be installed here: tests that compile plans will be skipped"; \
	{ $(PIP) --no-deps -r requirements/triton.txt && "$(BIN)/python" requirements/arrange_triton.py; } || echo "a Triton server cannot be installed here: tests that run one will be skipped"; \
	$(PIP) --no-deps --upgrade --target "$(VENV)/typings" -r requirements/typings.txt; \
	"$(BIN)/python" requirements/repair_typings.py "$(VENV)/typings"; \
	$(PIP) --no-deps --no-build-isolation --editable .; \
	"$(BIN)/python" -c "import transformers, trt_redknot; transformers.DeepseekV4ForCausalLM, trt_redknot.Engine"; \
	rm -f "$(VENV)"/.installed-*; touch "$(STAMP)"

plugins: venv
	@$(BIN)/python setup.py build_plugins

tools: venv
	@$(BIN)/python setup.py build_plugins --for-tools

kernels: $(TOOLS)
	@if command -v nvcc >/dev/null; then MAKEFLAGS=--no-print-directory $(BIN)/python setup.py build_plugins --kernels-only; fi

compiled: kernels venv
	@MAKEFLAGS=--no-print-directory $(BIN)/python setup.py build_plugins

# A local version label (torch 2.13.0+cpu) names a build of the same release: the lock keeps the release.
lock: venv
	@{ echo "# Every package of the environment, exactly. Written by make lock."; \
	  $(BIN)/python -m pip freeze --all --disable-pip-version-check --exclude-editable --exclude pip $(patsubst %,--exclude %,$(shell sed -n 's/==.*//p' requirements/plugins.txt requirements/tensorrt.txt requirements/triton.txt)) | sed 's/+[a-z0-9.]*$$//'; } > requirements/constraints.txt

clean:
	@rm -rf build demo .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info trt_redknot/lib
	@find trt_redknot tests examples run -name __pycache__ -type d -prune -exec rm -rf {} +
