# What a newcomer and a developer type. Python 3.11+ with venv and pip is enough; everything else lands in .venv.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
PYTEST_ARGS ?= -n 3 --dist loadfile

# The checkout's path is part of the stamp's name: a moved or copied checkout is set up again.
HERE := $(shell pwd | cksum | cut -d' ' -f1)
RUN_STAMP := .venv/.ready-run-$(HERE)
DEV_STAMP := .venv/.ready-dev-$(HERE)

.PHONY: help demo test tools test-vllm check worlds bench bench-vllm format lock clean
.DEFAULT_GOAL := help

help:
	@echo "make demo              a chat model, an embedder and a reranker share memory for two of them"
	@echo "make demo ARGS=--once  the same, and end after the tour"
	@echo "make test              all tests (real llama-servers, no GPU needed)"
	@echo "make tools             fetch the programs that judge generated files and pushed models (Debian; tests without them are skipped)"
	@echo "make test-vllm         the tests against a true vLLM server on the CPU (installs 2.5 GB first)"
	@echo "make check             ruff, mypy, import-linter"
	@echo "make worlds            2,000 worlds of faults that nobody has seen before, against every invariant (about 4 minutes)"
	@echo "make bench             every benchmark (about 15 minutes on a quiet machine)"
	@echo "make bench-vllm        what sleep is worth: true vLLM servers, on the CPU where there is no GPU (a quarter of an hour)"

$(RUN_STAMP): requirements.lock models.lock pyproject.toml scripts/setup
	@PYTHON="$(PYTHON)" scripts/setup run
	@touch $@

$(DEV_STAMP): requirements-dev.lock models.lock pyproject.toml scripts/setup
	@PYTHON="$(PYTHON)" scripts/setup dev
	@touch $@ $(RUN_STAMP)

demo: $(RUN_STAMP)
	@$(BIN)/greenroom demo $(ARGS)

test: $(DEV_STAMP)
	@command -v cc >/dev/null || { echo "make test: a C compiler is needed (a stub GPU driver is compiled). On Debian: apt-get install gcc libc6-dev" >&2; exit 1; }
	@scripts/test $(PYTEST_ARGS) $(ARGS)

tools:
	@scripts/setup-tools

test-vllm: $(DEV_STAMP)
	@scripts/setup-vllm
	$(BIN)/python -m pytest -m vllm tests $(ARGS)

check: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

worlds: $(DEV_STAMP)
	$(BIN)/python -m tests.world --count 2000 $(ARGS)

bench: $(DEV_STAMP)
	$(BIN)/python -m bench.relay
	$(BIN)/python -m bench.cold_start
	$(BIN)/python -m bench.traces_run
	$(BIN)/python -m bench.scheduling

bench-vllm: $(DEV_STAMP)
	@scripts/setup-vllm
	$(BIN)/python -m bench.sleep $(ARGS)

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock:
	$(BIN)/python scripts/lock

clean:
	rm -rf .venv .cache runs build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
