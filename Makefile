PYTHON ?= python3
BIN := .venv/bin
.DELETE_ON_ERROR:
.PHONY: demo test check format screenshots clean

demo: .venv/.ready
	$(BIN)/python -m flatpeak.controller demo

test: .venv/.ready
	$(BIN)/python -m pytest

check: .venv/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: .venv/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: .venv
.venv: .venv/.ready

# One stamp file: the environment is rebuilt only when what it is made from changes.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Flatpeak needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Needs Chromium; takes some minutes.
screenshots: .venv/.ready
	PYTHONPATH=controller:workers:kernels:tests $(BIN)/python tests/screenshots.py

clean:
	rm -rf .venv .pytest_cache .ruff_cache
