# Everything from a fresh machine: `make demo` and `make test` set up what they need; a second call is fast.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Real images for studies and slow tests, where they lie beside the project.
export TORCHEMO_DATA ?= $(wildcard $(CURDIR)/../shared/data)
# What is imported is compiled once and kept; compiling all that is installed beforehand takes a minute longer.
export PYTHONDONTWRITEBYTECODE =
# Two test processes with one thread each beat one with two. The one that is done takes tests of the other.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

.PHONY: help setup demo docs test unit shapes faults slow rest lint style types bench reproducibility attack clean

help:
	@echo "make setup   install torchemo and its tools into $(VENV)"
	@echo "make demo    curves that come back, with and without memory (about a minute)"
	@echo "make test    lint, types, import contract, all tests"
	@echo "make docs    the documentation site, in docs/_site/index.html"
	@echo "make unit    the fast tests only (under two minutes)"
	@echo "make bench   all speed records and docs/speed.md anew (about 15 minutes of an idle machine)"
	@echo "make attack  random hostile files, requests, kills and stops for ten minutes (SECONDS=600)"
	@echo "make reproducibility   docs/reproducibility.md and all tables of docs from the recorded studies"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade "pip>=25.1"
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e . --group dev
	$(BIN)/python -W ignore -c "import torch.func, scipy.stats, matplotlib.pyplot, higher, torchopt"
	touch $@

demo: setup
	$(BIN)/torchemo demo

# Warnings are errors: a broken link or an unreadable docstring stops the build.
docs: setup
	$(BIN)/python -m sphinx -q -W -b html -d docs/_site/.doctrees docs docs/_site
	@echo "docs/_site/index.html"

lint: style types

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy

# What the paper claims beside what was recorded, from the files in studies/.
reproducibility: setup
	$(BIN)/torchemo study reproducibility

unit: setup
	$(PYTEST) -m "not slow and not faults and not study"

# The unit tier once more with every shape and type annotation enforced at run time.
shapes: setup
	$(PYTEST) -m "not slow and not faults and not study" --jaxtyping-packages=torchemo,beartype.beartype

faults: setup
	$(PYTEST) -m "(faults or study) and not slow"

slow: setup
	$(PYTEST) -m slow

# The three tiers that remain, in one collection.
rest: setup
	$(PYTEST) -m "slow or faults or study"

# Types are checked beside the last tests, where a processor is free now and then.
test: style unit
	$(MAKE) --no-print-directory -j2 types rest

# QUICK=--quick shows in two minutes that it works.
bench: setup
	for what in step memory data limit growth; do \
		$(BIN)/torchemo bench $$what $(QUICK) --out benchmarks/results/$$what.json || exit 1; \
	done
	$(BIN)/python benchmarks/page.py

# Random hostile cases for SECONDS; failures print the seed that repeats them.
SECONDS ?= 600
attack: setup
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.attack --seconds $(SECONDS) --out tests/attack/recorded.json
	$(BIN)/python -m tests.attack.page

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis runs docs/_site docs/reference/generated
