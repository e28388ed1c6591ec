# `make run` serves the demo model on this machine; `make test` checks everything. The rest is for working on the code.
# Everything that is installed lives in .venv and follows pyproject.toml; fetched models live in the user's cache.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
APP := deployments/app.yaml

.PHONY: run test nightly check fix lint gpu

run: .venv/.installed-run
	$(BIN)/cb-ray serve --fetch $(APP)
	$(BIN)/serve run $(APP)

test: .venv/.installed-test lint
	$(BIN)/python -m pytest

# The laws of the core and odd requests at the door, with ten thousand examples each; a thousand clients that leave.
nightly: .venv/.installed-test
	$(BIN)/python -m pytest tests/core tests/serving/test_http_fuzz.py tests/serving/test_abuse.py --hypothesis-profile=nightly --timeout=7200

# On a machine with a GPU: needs torch, transformers, triton and pytest of whatever Python it is given, and installs nothing.
gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m pytest -c tests/gpu/pytest.ini --durations=5 -q tests/gpu

# Before a commit: everything but the tests that start a cluster or need the demo model.
check: .venv/.installed-test lint
	$(BIN)/python -m pytest -m "not serve and not real"

fix: .venv/.installed-test
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

lint: .venv/.installed-test
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright

# pip must know dependency groups, which the one that comes with Python 3.11 does not.
.venv/.pip: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --upgrade 'pip>=25.1'
	touch $@

.venv/.installed-run: .venv/.pip
	$(BIN)/python -m pip install --editable '.[serve,gguf]' --group tested
	touch $@

.venv/.installed-test: .venv/.pip
	$(BIN)/python -m pip install --editable '.[serve,gguf,bench]' --group test
	touch .venv/.installed-run $@
