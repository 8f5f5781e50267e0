# Everything runs in .venv, which the first target that needs it makes. Set PYTHON to choose the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS := $(VENV)/.docs

.PHONY: help demo test test-gpu test-matrix lint typecheck format check docs pictures dist clean
PYTHONS ?= 3.11 3.12 3.13
TORCHES ?= 2.11 2.13 2.15

help:  ## what each target does
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1: \2/p' $(MAKEFILE_LIST)

demo: $(STAMP)  ## capture and benchmark the reference decoder, and print both reports
	$(BIN)/cgplan capture --config configs/decoder_cpu.yaml
	$(BIN)/cgplan bench --config configs/decoder_cpu.yaml

# tests/conftest.py says which tests stay together, and puts the longest first: that order is kept. Bytecode is written, or
# each worker and each of the processes that tests start would compile the tests and the package again.
test: $(STAMP)  ## all tests that need no GPU, in two processes
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m "not gpu" -n 2 --dist loadfile --no-loadscope-reorder

test-gpu: $(STAMP)  ## the tests that need a GPU
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python -m pytest tests/programs  # they take a GPU where there is one

# Of PYTHONS, those that are there as python3.N; what cannot be installed is skipped, and said.
test-matrix:  ## all tests that need no GPU, for each of PYTHONS and TORCHES
	@mkdir -p build && grep -v '^torch==' constraints.txt > build/constraints.txt
	@for python in $(PYTHONS); do for torch in $(TORCHES); do \
	  name="Python $$python, torch $$torch"; at=build/matrix/$$python-$$torch; \
	  python$$python -c '' 2> /dev/null || { echo "$$name: skipped, no python$$python"; continue; }; \
	  python$$python -m venv $$at && $$at/bin/pip install -q -c build/constraints.txt "torch==$$torch.*" -e '.[dev,transformers]' \
	    2> $$at/pip.log || { echo "$$name: skipped, $$(tail -n 1 $$at/pip.log)"; continue; }; \
	  echo "$$name:"; $$at/bin/python -m pytest -m "not gpu" -n 2 --dist loadfile --no-loadscope-reorder || bad="$$bad; $$name"; \
	done; done; if [ -n "$$bad" ]; then echo "failed$$bad"; exit 1; fi

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
	@mkdir -p build
	$(BIN)/cgplan schema --format markdown > build/config-reference.md
	mv build/config-reference.md docs/config-reference.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

dist:  ## build the sdist and the wheel, check them, and run an example by the wheel alone
	rm -rf dist build/tools build/empty build/example
	$(PYTHON) -m venv build/tools && build/tools/bin/pip install -q build twine
	build/tools/bin/python -m build && build/tools/bin/twine check --strict dist/*
	$(PYTHON) -m venv build/empty && build/empty/bin/pip install -q -c constraints.txt dist/*.whl
	cd build && empty/bin/cgplan examples copy decoder_cpu example && empty/bin/cgplan capture example/decoder_cpu.yaml

# PNG of the page that docs/pictures/report.json makes: `cgplan bench configs/decoder_0_6b.yaml` on one H200.
pictures: $(STAMP)  ## draw the pictures of the docs; needs chromium
	mkdir -p build
	$(BIN)/cgplan inspect docs/pictures/report.json --html build/report.html > /dev/null
	chromium --headless --no-sandbox --hide-scrollbars --window-size=1200,790 --screenshot=docs/pictures/report.png build/report.html

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
