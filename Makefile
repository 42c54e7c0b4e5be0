# Every target sets itself up: on a fresh clone it first makes .venv (Python 3.11 or newer, with venv and pip).
PYTHON ?= python3
PART ?= 0
BIN := .venv/bin
READY := .venv/.ready
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-part test-all lint format types bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "PYTHON=python3.12 make setup chooses the interpreter; make test ARGS='-k layout' passes options to pytest"

setup: $(READY) ## make .venv with autopar, its dependencies and the development tools

# No stamp means a missing or half-made environment: start from nothing. The stamp goes first and comes back last.
$(READY): pyproject.toml
	@test -e $@ || $(PYTHON) -m venv --clear .venv
	@rm -f $@
	$(BIN)/python -m pip install -e '.[dev,demo]'
	@touch $@

demo: $(READY) ## see autopar find and run a plan, 2 minutes (ARGS=--long: 200 steps)
	$(BIN)/python examples/demo.py $(ARGS)

test: $(READY) ## tests that are not marked slow
	$(PYTEST) -m "not slow"

test-part: $(READY) ## what `make test` runs and a third of the slow tests (PART=0, 1 or 2)
	$(PYTEST) --part $(PART)/3

test-all: $(READY) ## all tests
	$(PYTEST) --durations=40

lint: $(READY) ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY) ## rewrite the code as `make lint` wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY) ## pyright, strict where no torch is
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(READY) ## list the benchmarks
	$(BIN)/python -m benchmarks $(ARGS)

clean: ## remove .venv and everything that was built
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
