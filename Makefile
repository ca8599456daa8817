# `make demo` and `make test` need nothing but Python 3.10 or newer: each sets up .venv first.
#
#   make TORCH=cpu demo             torch for the CPU; TORCH=default: that of the package index, with
#                                   CUDA on most machines; else it depends on whether there is a GPU.
#                                   A torch that is in .venv already is kept.
#   make PYTHON=python3.12 test     another interpreter
#   make PROMPT="Who was Ada?" demo another question
#   make PIP_FLAGS="..." demo       extra arguments for pip, for instance another package index

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo stage test test-all test-arm64 lint docs docs-site recordings hooks clean

PYTHON ?=
TORCH ?= auto
PIP_FLAGS ?=
TEST_WORKERS ?= 3
STAGES ?= 3
PROMPT ?=

export PROMPT  # reaches the recipe through the environment, so that quotes in it are only text
# Hundreds of processes start in the tests: each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE
export PYTHON TORCH  # read by tools/install.sh

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-by-make
DEMO_STAMP := $(VENV)/.installed-for-demo

help:
	@echo "make demo      set up, then answer one question on a ring of $(STAGES) stages on this machine"
	@echo "make stage     set up what a device needs that only computes; then .venv/bin/edgespec join"
	@echo "make test      set up, then run the quick tests: every promise, in three to four minutes"
	@echo "make test-all  set up, then run all tests but the slow ones"
	@echo "make test-arm64  as root: set up, then compare an emulated ARM core with this machine"
	@echo "make lint      set up, then check style and types"
	@echo "make hooks     let git check commit messages by the rules of CONTRIBUTING.md"
	@echo "make docs      set up, then write the generated parts of docs/commands.md"
	@echo "make recordings  as root: type the sessions of docs/results/complaints.md again"
	@echo "make docs-site set up, then make the documentation a site, in build/site"
	@echo "make clean     remove everything that these made"

# What `make demo` installs is enough for a user; the other targets add the tools for tests.
$(STAMP): setup.cfg pyproject.toml constraints.txt tools/constraints.py
	@tools/install.sh $(VENV) '.[test]' $(PIP_FLAGS)
	@touch $@

$(DEMO_STAMP): setup.cfg pyproject.toml constraints.txt tools/constraints.py
	@tools/install.sh $(VENV) '.[all]' $(PIP_FLAGS)
	@touch $@

# A device that only computes: no HTTP API, no pictures, no bitsandbytes.
stage:
	@tools/install.sh $(VENV) '.[stage]' $(PIP_FLAGS)

demo: $(or $(wildcard $(STAMP)),$(DEMO_STAMP))
	@$(BIN)/edgespec demo --stages $(STAGES) $${PROMPT:+--prompt "$$PROMPT"}
	@echo "edgespec is $(BIN)/edgespec here"

# One more than the cores that the tests are meant for, as some of them wait; what a file's tests
# share is made once.
PYTEST = $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile

test: $(STAMP)
	@$(PYTEST) -m "not slow and not thorough"

test-all: $(STAMP)
	@$(PYTEST)

# A Debian for arm64 under QEMU; ARM64 is the folder that it stays in.
ARM64 ?= build/arm64
test-arm64: $(STAMP)
	@$(BIN)/python tools/arm64.py --folder $(ARM64)

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy edgespec tools

# A hook that is there stays, and so do those of core.hooksPath, which other clones may share.
HOOK := tools/commit_msg.py
hooks:
	@hook="$$(git rev-parse --git-path hooks/commit-msg)"; \
	if [ "$$hook" -ef $(HOOK) ]; then \
	  echo "git checks commit messages already: $$hook"; \
	elif [ -e "$$hook" ] || [ -L "$$hook" ] || git config core.hooksPath >/dev/null; then \
	  echo "Nothing was changed: $$hook is there, or core.hooksPath is set." >&2; \
	  echo "Let your own commit-msg hook call $(CURDIR)/$(HOOK) \"\$$1\"" >&2; \
	  exit 1; \
	else \
	  mkdir -p "$$(dirname "$$hook")"; ln -s "$(CURDIR)/$(HOOK)" "$$hook"; \
	  echo "git checks commit messages from now on: $$hook"; \
	fi
# What docs/commands.md takes from the command line; a test compares the two.
docs: $(STAMP)
	@$(BIN)/python tools/commands_page.py

# Terminal sessions of real commands, on boards that are network namespaces.
recordings: $(STAMP)
	@$(BIN)/python tests/benchmarks/recordings.py

# The pages as a site, in build/site; every link and anchor has to lead somewhere.
docs-site: $(STAMP)
	@$(BIN)/python -c 'import mkdocs' 2>/dev/null || $(BIN)/python -m pip install --quiet \
	  --disable-pip-version-check --constraint constraints.txt $(PIP_FLAGS) mkdocs
	@$(BIN)/python -m mkdocs build --strict --quiet
	@echo "The documentation is in build/site/index.html"

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
