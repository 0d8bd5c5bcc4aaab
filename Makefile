# Needs Python >= 3.11, make and a C++17 compiler. Every target below makes
# the virtual environment and builds the extension first, and again only when
# something they depend on has changed.

PYTHON ?= python3
PYTHON312 ?= python3.12
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
# How many tests run at once.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist=worksteal
PIP_INSTALL := $(BIN)/python -m pip install --quiet \
  --disable-pip-version-check -c $(CONSTRAINTS)

CXX_SOURCES := $(wildcard cpu_ops/*.h cpu_ops/*.cc cpu_ops/tests/*.h \
  cpu_ops/tests/*.cc experiments/adam/*.cc)

# An aarch64 Python, unpacked for the emulator.
AARCH64 := build/aarch64

.PHONY: train test test-slow test-sanitize test-all test-newest test-isa \
  test-aarch64 test-mutations lint format bench bench-adam wheels install \
  clean help
.DELETE_ON_ERROR:

help:
	@echo "make train     train a GPT on real text, about two minutes"
	@echo "make test      all fast tests"
	@echo "make test-all  all tests"
	@echo "make test-sanitize  the kernels' tests with ASan, UBSan and TSan"
	@echo "make test-newest  all fast tests on Python 3.12 and the newest jax"
	@echo "make test-isa  compare the kernels' bits between instruction sets"
	@echo "make test-aarch64  build for aarch64, test the kernels in an emulator"
	@echo "make wheels    build wheels for x86-64 and aarch64 into dist/"
	@echo "make test-mutations  break the code and see the tests fail"
	@echo "make lint      check format, style and types"
	@echo "make format    put the sources into their format"
	@echo "make bench     compare the step with plain jax + optax"
	@echo "make bench-adam  compare the host's AdamW with others"
	@echo "make clean     remove what was built (not the runs)"

train: install
	$(BIN)/python -m experiments.train

test: install
	$(PYTEST) -m "not slow"

test-slow: install
	$(PYTEST) -m "slow and not sanitizer"

# ASan, UBSan and TSan. Fails where the compiler lacks one of them.
test-sanitize: install
	$(PYTEST) -m sanitizer tests/test_cpu_ops.py

test-all: test test-slow test-sanitize

# A venv, and an extension, beside those of $(VENV).
test-newest:
	$(MAKE) test PYTHON=$(PYTHON312) VENV=.venv-newest \
	  CONSTRAINTS=constraints-newest.txt

# Says which instruction sets it had to leave out.
test-isa: install
	$(BIN)/python cpu_ops/tests/compare_isas.py --build-dir=build/isa

test-aarch64: install
	$(BIN)/python tests/aarch64/emulate.py test --dir=$(AARCH64) --dist=dist

test-mutations: install
	$(BIN)/python -m tests.mutations
	$(BIN)/python -m tests.python_mutations

wheels: install
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation -w dist .
	$(BIN)/python tests/aarch64/emulate.py wheel --dir=$(AARCH64) --dist=dist

lint: install
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)
	$(BIN)/pyright --pythonpath $(BIN)/python

format: install
	$(BIN)/ruff format
	$(BIN)/ruff check --fix
	$(BIN)/clang-format -i $(CXX_SOURCES)

bench: install
	$(BIN)/python -m experiments.overhead --json=runs/overhead.json

# torch and DeepSpeed, which sojax does not need, get a venv beside $(VENV).
bench-adam:
	$(MAKE) VENV=.venv-bench .venv-bench/.peers
	.venv-bench/bin/python -m experiments.adam_bench --json=runs/adam.json

install: $(VENV)/.installed

$(VENV)/.peers: $(VENV)/.installed constraints-bench.txt
	$(PIP_INSTALL) -c constraints-bench.txt torch deepspeed ninja
	@touch $@

# Build tools, and jax for its headers, come first and the build is not isolated
# from them, so that constraints.txt pins them as well.
$(VENV)/.installed: $(VENV)/.created pyproject.toml $(CONSTRAINTS) setup.py \
    $(wildcard cpu_ops/*.h cpu_ops/*.cc cpu_ops/*.json)
	$(PIP_INSTALL) setuptools wheel pybind11 jax
	$(PIP_INSTALL) --no-build-isolation -e '.[dev]'
	@touch $@

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit( \
	  v < (3, 11) and "sojax needs Python >= 3.11 and $(PYTHON) is " \
	  "%d.%d; name another: make PYTHON=python3.12" % v[:2])'
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) -m venv failed;" \
	  "on Debian and Ubuntu: apt install python3-venv python3-dev" >&2; \
	  exit 1; }
	@touch $@

clean:
	rm -rf $(VENV) .venv-newest .venv-bench build dist *.egg-info sojax/*.so \
	  .pytest_cache .ruff_cache .hypothesis
	find sojax experiments tests -name __pycache__ -exec rm -rf {} +
