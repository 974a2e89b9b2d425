# The same commands on every machine and in CI. `make env` is implied by all others.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: env demo check test format bench clean

env: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Penstock needs Python 3.11 or newer; call make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/pip install --quiet --editable '.[dev]'
	# Beside a torch for CPUs torchvision stops transformers from loading, so it lies apart (workloads/torchvision.py).
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/pip install --quiet --no-deps --target .venv/apart torchvision
	touch $@

demo: env
	$(BIN)/penstock demo

check: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check
	$(BIN)/pytest -n 2 --dist worksteal

format: env
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: env
	$(BIN)/penstock bench planner
	$(BIN)/penstock bench profile
	$(BIN)/penstock bench runtime

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis penstock-runs
