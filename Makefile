# One command each: `make serve` and `make test` set everything up by themselves.
#
# Needs: python3 >= 3.11 (another one: make PYTHON=python3.12), make, a C++ compiler.

PYTHON ?= python3
VENV   ?= .venv
# Another package index for torch alone, such as the one with CPU builds that pytorch.org names ("Get started").
TORCH_INDEX ?=
TORCH  ?= 2.13.0
# The Triton that builds of this torch for GPUs ask for; its CPU build asks for none. For the compile gate of AMD GPUs.
TRITON ?= 3.7.1
MODEL  ?= smollm2
# Test processes; they share the cores.
JOBS   ?= 2

# JAX lives in an environment of its own, on top of that one.
TPU_VENV ?= .venv-tpu
BIN   := $(VENV)/bin
STAMP := $(VENV)/.hardpoint-setup
FILES := pyproject.toml requirements-dev.txt core/pyproject.toml platforms/pyproject.toml plugins/cpu/pyproject.toml \
         plugins/torch_gpu/pyproject.toml
TPU_STAMP := $(TPU_VENV)/.hardpoint-setup
TRITON_STAMP := $(VENV)/.triton-$(TRITON)
CODE  := core platforms plugins tests scripts
# In an order in which no long file comes last.
TPU_TESTS := tests/server/test_tpu_device.py tests/reference/tpu

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-core test-all test-tpu sanitizer sanitize rocm-aot tpu-aot lint format stats clean

help:  ## what you can make
	@echo "Hardpoint"
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1	\2/' | expand -t 18
	@echo "  Settings: PYTHON=$(PYTHON) MODEL=$(MODEL) JOBS=$(JOBS) TORCH_INDEX=$(TORCH_INDEX)"

setup: $(STAMP)  ## create .venv and install everything into it (done once)

$(STAMP): $(FILES) .ci/install
	@PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" .ci/install
	@touch $@

serve: setup  ## pull the default model if needed and serve it on http://127.0.0.1:8000
	@$(BIN)/hardpoint pull $(MODEL) > /dev/null
	@exec $(BIN)/hardpoint serve $(MODEL)

test: setup  ## lint, then the tests (of many like cases a part), `make sanitize` and `make test-tpu`
	@$(MAKE) --no-print-directory -j 4 lint sanitizer $(TPU_STAMP) $(TRITON_STAMP)
	@$(MAKE) --no-print-directory test-core
	@$(MAKE) --no-print-directory sanitize
	@$(MAKE) --no-print-directory test-tpu

# In the order of folders: the long files are few tests each, and would all come last.
test-core: setup  ## the tests that need neither a sanitizer nor JAX
	@echo "== tests ($(JOBS) processes)"
	@$(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --timeout 600 --durations 8

test-all: setup  ## `make test` with every case of every test (long)
	@HARDPOINT_TEST_EVERY=1 $(MAKE) --no-print-directory test

test-tpu: $(TPU_STAMP)  ## hardpoint-tpu on the processor, and its programs compiled for a TPU, of which none is needed
	@echo "== tests of hardpoint-tpu"
	@JAX_PLATFORMS=cpu $(TPU_VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --timeout 600 \
		--durations 8 $(TPU_TESTS)

$(TPU_STAMP): $(STAMP) .ci/install-tpu plugins/tpu/pyproject.toml
	@VENV="$(VENV)" TPU_VENV="$(TPU_VENV)" .ci/install-tpu
	@touch $@

$(TRITON_STAMP): .ci/install-triton | $(STAMP)
	@VENV="$(VENV)" TRITON="$(TRITON)" .ci/install-triton

sanitize: setup  ## the CPU kernels' tests under AddressSanitizer and UBSan
	@VENV="$(VENV)" .ci/sanitize -n $(JOBS)

sanitizer: setup
	@VENV="$(VENV)" .ci/sanitize --build-only

tpu-aot: $(TPU_STAMP)  ## compile hardpoint-tpu's programs for three kinds of TPU, none of which is needed (half an hour)
	@HARDPOINT_TPU_TARGETS="v5e-2x2 v6e-2x2 7x-2x2x1" HARDPOINT_TPU_DEPTH=all HARDPOINT_TEST_EVERY=1 \
		JAX_PLATFORMS=cpu $(TPU_VENV)/bin/python -m pytest tests/reference/tpu/test_ahead_of_time.py

rocm-aot: $(TRITON_STAMP)  ## compile every Triton kernel for five AMD GPUs, none of which is needed, by two Tritons (an hour)
	@PYTHONPATH=$(VENV)/triton-pinned $(BIN)/python tests/reference/rocm/compile_gate.py gfx90a gfx942 gfx950 gfx1100 gfx1201
	@$(BIN)/python tests/reference/rocm/compile_gate.py gfx90a gfx942 gfx950 gfx1100 gfx1201

lint: setup  ## ruff, mypy --strict and the import contracts
	@echo "== lint"
	@$(BIN)/ruff check --quiet $(CODE)
	@$(BIN)/ruff format --check --quiet $(CODE) || { echo "not formatted: run 'make format'"; exit 1; }
	@$(BIN)/mypy --no-error-summary
	@PYTHONPATH=plugins/cuda:plugins/rocm:plugins/tpu $(BIN)/lint-imports --no-cache > $(VENV)/lint-imports.log 2>&1 || { cat $(VENV)/lint-imports.log; exit 1; }

format:  ## rewrite the sources as the formatter wants them
	@$(BIN)/ruff format $(CODE)
	@$(BIN)/ruff check --fix --quiet $(CODE)

stats: setup  ## lines of plugin code per part and level; vendor words in neutral code
	@$(BIN)/python tests/architecture/stats.py

clean:  ## remove .venv and everything that was built (pulled models stay)
	@rm -rf $(VENV) $(TPU_VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache build dist
	@find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} + -o -name '*.egg-info' -type d -prune -exec rm -rf {} +
