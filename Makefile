# make demo: the main job.  make test: lint, types, tests.  Both create .venv and install into it.
# make test-all: the slow tests too.  make mutants: does the suite notice broken formulas? (half an hour)
# make fuzz: every reader of outside files, given 1,000 damaged ones each; with FUZZ=full 10,000 (docs/use/reliability.md).
# make kill: runs that are killed at every file operation and at random moments, and go on (docs/use/reliability.md).
# make docs: the documentation site, into build/site; any warning fails it.
# make test-studio: the studio in a real browser (a Chromium of the system: apt-get install chromium), in two minutes.
# make test-gpu: the tests that need CUDA, with the packages of $(PYTHON) (.venv has a torch for CPUs).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all test-studio test-gpu docs mutants fuzz kill coverage lint clean

demo: $(VENV)/.demo
	$(BIN)/mmdgs demo --out demo --overwrite

test: lint
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow and not gpu"

test-all: lint
	$(BIN)/pytest -n 2 --dist worksteal -m "not gpu" --hypothesis-profile more

test-studio: $(VENV)/.studio
	$(BIN)/pytest -p no:xdist tests/studio

test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest tests/test_gpu.py

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

mutants: $(VENV)/.test
	$(BIN)/python tests/mutants.py

fuzz: $(VENV)/.test
	$(BIN)/python tests/fuzz/run.py --cases $(if $(filter full,$(FUZZ)),10000,1000)

kill: $(VENV)/.test
	$(BIN)/python tests/kill.py

# The tests with the lines that were run: twice the time.
coverage: $(VENV)/.test
	$(BIN)/pytest -n 2 --dist worksteal --cov=mmdgs --cov-report=term

lint: $(VENV)/.test
	$(BIN)/ruff check src experiments tests docs
	$(BIN)/ruff format --check src experiments tests docs
	$(BIN)/mypy

clean:
	rm -rf $(VENV) demo .mypy_cache .pytest_cache .ruff_cache .coverage

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "mmdgs needs Python 3.11 or newer; set PYTHON, e.g. make PYTHON=python3.11 demo"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/pip pyproject.toml constraints.txt
	$(BIN)/pip install --quiet -c constraints.txt -e '.[report]'
	@touch $@

$(VENV)/.studio: $(VENV)/.test
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test,studio-test,docs]'
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(BIN)/pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@
