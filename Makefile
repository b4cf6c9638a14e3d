PYTHON ?= python

.PHONY: check lint test test-all bench

check: lint test

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

test:
	$(PYTHON) -m pytest

test-all:
	$(PYTHON) -m pytest -m "slow or not slow"

bench:
	$(PYTHON) -m benchmarks.training --case lm-tiny --threads 1
	$(PYTHON) -m benchmarks.sweep
	$(PYTHON) -m benchmarks.lda
	$(PYTHON) -m benchmarks.teleclass refine
