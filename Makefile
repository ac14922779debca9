# `make demo` and `make test` need nothing but Python 3.11 or newer: the first call makes .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: demo test check lint test-slow soak bench docs clean install

demo: $(STAMP)  ## the whole loop on this machine, at most 12 minutes
	$(BIN)/onlinerl demo

test: check  ## everything but the slow tier, under 15 minutes

check: lint  ## the whole truth: style, types, who may import whom, and the tests with warnings as errors
	$(PYTEST)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-slow: $(STAMP)  ## at most 45 minutes
	$(PYTEST) -m slow

soak: $(STAMP)  ## longer than CI allows; run by hand on a quiet machine; writes docs/soak.md
	mkdir -p build && rm -f build/incidents.jsonl
	ONLINERL_INCIDENTS=build/incidents.jsonl $(PYTEST) -m soak; code=$$?; \
	  $(BIN)/python -m tests.soak_report build/incidents.jsonl docs/soak.md && exit $$code

bench: $(STAMP)  ## measurements, as JSON under bench/results
	for file in bench/[a-z]*.py; do \
	  $(BIN)/python -m bench.$$(basename $$file .py) || exit 1; \
	done

docs: $(STAMP)  ## docs/settings.md from the settings themselves
	$(BIN)/python -c 'from onlinerl.config import reference; print(reference(), end="")' > docs/settings.md

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
