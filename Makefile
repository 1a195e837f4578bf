# `make demo` and `make test` each set up all they need in .venv; a second run does nothing until a requirement changes.

PY := .venv/bin/python
STAMP := .venv/specplug-setup
INPUTS := .ci/setup $(wildcard requirements/*.txt core/pyproject.toml plugins/*/pyproject.toml \
  plugins/*/CMakeLists.txt plugins/*/src/cpp/*)
SOURCES := core/src $(wildcard plugins/*/src)

# Waiting OpenMP threads that spin starve every other process on a small machine.
OMP_WAIT_POLICY ?= PASSIVE
export OMP_WAIT_POLICY
# One test process a core, one thread each: most tests are Python, and tiny products gain nothing from a second thread.
PARALLEL := -n auto --maxprocesses 4 --dist loadscope
test verify: export OMP_NUM_THREADS ?= 1
# Packages of another environment must not leak into .venv.
unexport PYTHONPATH PYTHONHOME

# What the demo compares: plain decoding, n-grams, and the head that training/ made for the demo model.
DEMO := none,NGRAM=ngram,EAGLE3=eagle3@training/drafts/eagle3-chain-2.json

# The stamp holds the folder it was made in: a moved or copied clone sets up again.
$(shell grep -qxF "$(CURDIR)" $(STAMP) 2>/dev/null || rm -f $(STAMP))

.PHONY: help setup demo test verify lint types format report clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo     decode a few prompts with a real model: plain, with n-grams, with a trained EAGLE-3 head'
	@echo 'make test     everything CI runs: ruff, mypy --strict, pytest without `slow` and `gpu`'
	@echo 'make verify   the `slow` tests'
	@echo 'make format   let ruff rewrite what it can;  make lint, make types: those checks alone'
	@echo 'make report   the longest files and functions: where to look, not a gate'
	@echo 'make clean    remove .venv and caches'
	@echo 'ARGS="..." is handed on to demo, pytest and report; PYTHON=... chooses the interpreter of .venv'

setup: $(STAMP)

$(STAMP): $(INPUTS)
	@PYTHON="$(PYTHON)" bash .ci/setup "$@"

demo: $(STAMP)
	@.venv/bin/specplug demo --algorithms $(DEMO) $(ARGS)

test: lint types
	@echo '== pytest, not slow, not gpu'
	@HF_HUB_OFFLINE=1 $(PY) -m pytest -q $(PARALLEL) -m 'not slow and not gpu' $(ARGS)

verify: $(STAMP)
	@echo '== pytest, slow'
	@HF_HUB_OFFLINE=1 $(PY) -m pytest -q $(PARALLEL) -m 'slow and not gpu' $(ARGS)

lint: $(STAMP)
	@echo '== ruff check, ruff format --check'
	@$(PY) -m ruff check --quiet .
	@$(PY) -m ruff format --check .

types: $(STAMP)
	@echo '== mypy --strict'
	@$(PY) -m mypy $(SOURCES)
	@MYPYPATH=training $(PY) -m mypy training/train.py training/evaluate.py

format: $(STAMP)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

report: $(STAMP)
	@$(PY) tools/sizes.py $(ARGS)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .nox dist
