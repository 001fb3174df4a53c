# SPDX-License-Identifier: Apache-2.0
# `make sweep` runs the main job, `make test` checks everything. Both set up .venv first
# and use it again when it is there.

PYTHON ?= python3
VENV ?= .venv
OUT ?= sweep-results
BIN := $(VENV)/bin
# One compute thread a process: two threads on a busy two-core machine ran ten times slower.
export OMP_NUM_THREADS ?= 1
# Test processes. A third one on two cores gained nothing; each comes to hold 4 to 6 GB.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 2 ? 2 : n < 8 ? n : 8)))

.PHONY: sweep test lint unit train-tiny train-tiny-k3 clean

sweep: $(VENV)/.ready
	$(BIN)/python -m dspark_k3.cli sweep --out $(OUT)

test: lint unit

lint: $(VENV)/.ready
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

unit: $(VENV)/.ready
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

train-tiny: $(VENV)/.ready
	$(BIN)/python -m experiments.train_tiny --out experiments/tiny

# On one GPU.
train-tiny-k3: $(VENV)/.ready
	$(BIN)/python -m experiments.train_tiny_k3 --out experiments/tiny

$(VENV)/.ready: pyproject.toml scripts/setup.sh
	PYTHON=$(PYTHON) VENV=$(VENV) bash scripts/setup.sh
	touch $@

clean:
	rm -rf $(VENV) $(OUT)
