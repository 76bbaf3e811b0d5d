# Each target does all its own set-up: nothing else has to be installed or activated.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo heal test test-slow test-all check bench clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

heal: $(VENV)/.installed
	$(BIN)/python examples/heal.py

# Every checkpoint is synced file by file: temporary folders lie in memory where that has 4 GB of room.
MEMORY := $(shell [ -w /dev/shm ] && [ "$$(df -Pk /dev/shm | awk 'NR == 2 { print $$4 }')" -gt 4000000 ] && echo /dev/shm)
PYTEST := $(if $(MEMORY),TMPDIR=$(MEMORY)) $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(VENV)/.installed
	$(PYTEST) -m 'not slow'

test-slow: $(VENV)/.installed
	$(PYTEST) -m slow

test-all: test test-slow

check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py tests/test_names.py

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks $(DATA)

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ds_pretrain needs Python 3.11 or newer, found " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) runs
