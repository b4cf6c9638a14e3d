PYTHON ?= python

.PHONY: docs check lint test test-all test-gpu-rig rehearse-gpu bench chaos fuzz audit

check: lint test

# The generated parts of docs/, and the site in site/. The build ends with an error at a dead link.
docs:
	$(PYTHON) -m docs.generate
	$(PYTHON) -m mkdocs build --strict

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

test:
	$(PYTHON) -m pytest

# With what takes minutes or needs the machine for itself: clusters, chaos, SLURM, object stores.
test-all:
	$(PYTHON) -m pytest -n 0 -m "slow or not slow"

# Tests on cards that do not exist: torch's CUDA wheel on stand-in libraries. The first run installs
# the wheel in .venv-gpu (two minutes, 5 GB).
test-gpu-rig:
	tests/gpu/rig/lane.sh .venv-gpu

# All that waits for a GPU (benchmarks/gpu.py), as small trainings on the CPU: minutes on two cores.
rehearse-gpu:
	$(PYTHON) -m benchmarks.gpu --quick --rehearse --minutes 9 $(if $(OUT),--out $(OUT))

# Chaos test: real runs, killed, corrupted or frozen at random. 50 rounds take an hour on two cores.
chaos:
	$(PYTHON) -m tests.chaos.rounds --rounds 50

# Fuzz every file reader with freshly generated corrupt files.
fuzz:
	RAYPIPE_FUZZ_EXAMPLES=5000 $(PYTHON) -m pytest tests/fuzz

# List known vulnerabilities of the pinned and of the installed packages. Not part of `check`: a
# newly published vulnerability must not break the build.
audit:
	$(PYTHON) -m pip_audit --strict --disable-pip --no-deps -r requirements.txt
	$(PYTHON) -m pip_audit --skip-editable

bench:
	$(PYTHON) -m benchmarks.trials sweep
	$(PYTHON) -m benchmarks.trials matrix
	$(PYTHON) -m benchmarks.lda
	$(PYTHON) -m benchmarks.teleclass
	$(PYTHON) -m benchmarks.scale calls
