# Everything runs in .venv, which the first target that needs it makes. Set PYTHON to choose the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS := $(VENV)/.docs

.PHONY: demo test test-gpu lint typecheck format check docs clean

demo: $(STAMP)  ## capture and benchmark the reference decoder, and print both reports
	$(BIN)/cgplan capture --config configs/decoder_cpu.yaml
	$(BIN)/cgplan bench --config configs/decoder_cpu.yaml

# tests/conftest.py says which tests stay together, and puts the longest first: that order is kept.
test: $(STAMP)  ## all tests that need no GPU, in two processes
	$(BIN)/python -m pytest -m "not gpu" -n 2 --dist loadfile --no-loadscope-reorder

test-gpu: $(STAMP)  ## the tests that need a GPU
	$(BIN)/python -m pytest -m gpu

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint typecheck  ## what every commit passes

docs: $(DOCS)  ## write the config reference from the models, and the site into build/site
	$(BIN)/cgplan schema --format markdown > docs/config-reference.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache

# torch is pinned in constraints.txt: on a machine without a GPU that version has a CPU wheel.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("cgplan needs Python 3.11 or newer, found " + sys.version.split()[0] + "; set PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,transformers]'
	@touch $(STAMP)

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $(DOCS)
