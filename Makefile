# Every target makes what it needs in .venv by itself; a stamp file there says what is done already.
# `run` needs wheels only, neither torch nor a compiler. `check` adds the linters, `test` the real verl.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := .ci/constraints.txt
# -c holds what is installed; the variables hold what builds it, in older and in newer pip.
INSTALL := PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS) \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)
EXTRAS := tdigest,tokenizer,torch,verl
DEMO := runs/demo

.PHONY: setup run test check bench fuzz demo clean
# pip must not run twice at a time in one environment.
.NOTPARALLEL:
.DELETE_ON_ERROR:

setup: $(VENV)/.check $(VENV)/.test

# The main job on the shipped logs, then what it threw away. A second run finds the steps unchanged.
run: $(VENV)/.run
	$(BIN)/rollsift filter data/tokens -r gfpo-shortest -o $(DEMO)
	$(BIN)/rollsift sql $(DEMO) "SELECT step, source_row, rank, response_length, reward, reason \
	FROM discarded ORDER BY response_length DESC, step, source_row LIMIT 5"

check: $(VENV)/.check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# make test PYTEST_ARGS="tests/test_imports.py -x". Tests that call make themselves see the same
# environment as when a person starts pytest. A file's tests share what is slow to set up, so files
# are what is spread over the cores; four hold what memory a process with verl takes.
test: $(VENV)/.test
	env -u MAKEFLAGS -u MAKELEVEL -u MFLAGS $(BIN)/python -m pytest -n auto --maxprocesses=4 --dist=loadfile --cov=rollsift --cov-report=term:skip-covered $(PYTEST_ARGS)

bench: $(VENV)/.test
	$(BIN)/python tests/bench/run.py

# Broken logs made at random; what must not happen is kept in runs/fuzz. make fuzz MINUTES=60
fuzz: $(VENV)/.test
	$(BIN)/python tests/fuzz/fuzz_readers.py --minutes $(or $(MINUTES),10)

# The loop once for real: a small policy samples, capture, filter and replay, and it samples again.
demo: $(VENV)/.test
	$(BIN)/python data/loop.py -o $(DEMO)-loop

clean:
	rm -rf $(VENV) runs dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.made:
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

$(VENV)/.run: pyproject.toml $(CONSTRAINTS) | $(VENV)/.made
	$(INSTALL) --editable .
	touch $@

$(VENV)/.check: $(VENV)/.run
	$(INSTALL) --editable '.[dev]'
	touch $@

# torch on its own and first: where a CPU build is at hand pip takes it, and what follows finds it
# installed and pulls no CUDA build of several GB. Not compiled: most of it is never imported.
$(VENV)/.test: $(VENV)/.run
	@echo 'installing torch and verl: about 2 GB, some minutes' >&2
	$(INSTALL) --no-compile torch
	$(INSTALL) --no-compile --editable '.[test,$(EXTRAS)]'
	touch $@
