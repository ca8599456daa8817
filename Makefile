# `make demo` and `make test` need nothing but Python 3.10 or newer: each sets up .venv first.
#
#   make PYTHON=python3.12 test     another interpreter
#   make PROMPT="2 + 2 =" demo      another prompt
#   make PIP_FLAGS="..." demo       extra arguments for pip, for instance another package index

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint clean

PYTHON ?=
PIP_FLAGS ?=
TEST_WORKERS ?= 2
STAGES ?= 3
PROMPT ?= Question: A farmer has 12 hens. Each hen lays 5 eggs a week. He eats 10 eggs and sells the rest \
for 2 dollars each. How many dollars does he make in a week?

export PROMPT  # reaches the recipe through the environment, so that quotes in it are only text

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-by-make
TYPES := build/types

# Usable means: recent enough, and able to make a virtual environment with pip in it. 3.11 comes
# first because every pin of constraints.txt exists for it.
CANDIDATES := $(if $(PYTHON),$(PYTHON),python3.11 python3 python3.12 python3.13 python3.10)

help:
	@echo "make demo      set up, then answer one question on a ring of $(STAGES) stages on this machine"
	@echo "make test      set up, then run the quick tests: every promise, in about three minutes"
	@echo "make test-all  set up, then run all tests but the slow ones"
	@echo "make lint      set up, then check style and types"
	@echo "make clean     remove everything that these made"

# One install serves every target, so that a second target starts at once. torch goes first: it
# alone decides which build (CPU or CUDA) the rest is installed beside.
$(STAMP): setup.cfg pyproject.toml constraints.txt
	@for candidate in $(CANDIDATES); do \
	  if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' \
	      2>/dev/null; then python="$$candidate"; break; fi; \
	done; \
	if [ -z "$${python:-}" ]; then \
	  echo "edgespec needs Python 3.10 or newer that can make virtual environments." >&2; \
	  echo "Tried: $(CANDIDATES)" >&2; \
	  echo "On Debian, Ubuntu and JetPack: sudo apt-get install python3 python3-venv" >&2; \
	  echo "Or name one: make PYTHON=/path/to/python3 ..." >&2; \
	  exit 1; \
	fi; \
	if [ ! -x $(BIN)/python ]; then \
	  echo "Making $(VENV) with $$python"; "$$python" -m venv $(VENV); \
	fi
	@echo "Installing into $(VENV); the first time takes some minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) \
	  -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) \
	  -c constraints.txt -e '.[test]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/edgespec demo --stages $(STAGES) --prompt "$$PROMPT"

PYTEST = $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadscope

test: $(STAMP)
	@$(PYTEST) -m "not slow and not thorough"

test-all: $(STAMP)
	@$(PYTEST)

# mypy has to see daemon/ and cli/ where they install, inside edgespec: a folder of links does it.
lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@rm -rf $(TYPES) && mkdir -p $(TYPES)/edgespec
	@ln -s $(CURDIR)/edgespec/* $(CURDIR)/daemon $(CURDIR)/cli $(TYPES)/edgespec/
	@cd $(TYPES) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/setup.cfg \
	  --cache-dir $(CURDIR)/.mypy_cache -p edgespec \
	  | sed -E 's,^edgespec/(daemon|cli)/,\1/,'

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
