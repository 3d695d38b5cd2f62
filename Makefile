# Everything from a fresh machine: `make demo` and `make test` set up what they need; a second call is fast.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Real pictures for studies and slow tests, where they lie beside the project.
export TORCHEMO_DATA ?= $(wildcard $(CURDIR)/../shared/data)
# Two test processes with one thread each beat one with two, and compiled files save every tier a quarter minute.
WORKERS ?= 2
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS)

.PHONY: help setup demo test unit shapes faults slow rest lint bench reproducibility clean

help:
	@echo "make setup   install torchemo and its tools into $(VENV)"
	@echo "make demo    MAML against MAML with memory on the embedded tasks"
	@echo "make test    lint, types, import contract, all tests"
	@echo "make unit    the fast tests only (under two minutes)"
	@echo "make bench   all speed records and docs/speed.md anew (about 15 minutes of an idle machine)"
	@echo "make reproducibility   REPRODUCIBILITY.md from the recorded studies"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade "pip>=25.1"
	$(BIN)/python -m pip install -q -c constraints.txt -e . --group dev
	touch $@

demo: setup
	$(BIN)/torchemo demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

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

test: lint unit rest

# QUICK=--quick shows in two minutes that it works.
bench: setup
	for what in step memory data limit growth; do \
		$(BIN)/torchemo bench $$what $(QUICK) --out benchmarks/results/$$what.json || exit 1; \
	done
	$(BIN)/python benchmarks/page.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis runs
