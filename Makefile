# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: ci demo setup test test-main test-interpreted test-cpu-avx512 test-cpu-avx2 test-all check check-style check-types check-figures check-tests format figures tables mutants clean

demo: $(READY)
	$(BIN)/redline climb resnet --budget 150s --sampling 3s --out redline-out/demo

# Targets that run one after the other beside the main tests, which leave the cores idle for a tenth of the time.
BESIDE := test-interpreted test-cpu-avx512 test-cpu-avx2

# All checks and tests.
ci: $(READY)
	@$(MAKE) --no-print-directory check
	@$(MAKE) --no-print-directory test

setup: $(READY)

test: $(READY)
	@trap 'kill $$beside' INT TERM; \
	$(MAKE) --no-print-directory --keep-going $(BESIDE) > $(VENV)/beside.txt 2>&1 & beside=$$!; \
	$(MAKE) --no-print-directory test-main; main=$$?; \
	wait $$beside; code=$$?; cat $(VENV)/beside.txt; exit $$((main || code))
# These tests measure time. They are repeated twice on failure, because other load on the machine can make them fail.
	$(BIN)/pytest -m "not gpu and not slow and alone" --durations=25 --reruns 2 $(shell grep -rl "mark.alone" tests)

test-main: $(READY)
	$(BIN)/pytest -m "not gpu and not slow and not alone" --durations=25 --numprocesses 2 --dist loadfile --no-loadscope-reorder

# Kernels in Triton's interpreter, in one process.
test-interpreted: $(READY)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/pytest -m "not gpu and not slow" --durations=25 $(wildcard tests/ops/*/test_triton.py)

# The tests that depend on the CPU, limited to AVX-512 without bf16 and fp16, or to AVX2 (on ARM: see cpu_features.py).
# They compile few programs, for which it does not pay to precompile the headers of torch.
test-cpu-avx512 test-cpu-avx2: test-cpu-%: $(READY)
	@limits=$$($(BIN)/python -m redline.machine.cpu_features $*) || exit; \
	if [ -z "$$limits" ]; then echo "This CPU has nothing that the limit $* hides: test-main has tested it."; exit; fi; \
	set -x; env $$limits OMP_NUM_THREADS=1 TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS=0 \
		$(BIN)/pytest -m "cpu and not gpu and not slow" $(shell grep -rl --include=*.py "mark.cpu" tests)

test-all: $(READY)
	$(BIN)/pytest
	TRITON_INTERPRET=1 $(BIN)/pytest -m "not gpu" $(wildcard tests/ops/*/test_triton.py)

check: $(READY)
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target check-types check-tests check-style check-figures

check-style: $(READY)
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/lint-imports

check-types: $(READY)
	$(BIN)/pyrefly check

check-figures: $(READY)
	$(BIN)/python benchmarks/tables.py --check
	$(BIN)/python benchmarks/claims.py --check
	$(BIN)/python benchmarks/model_tables.py --check

# Checks that all tests can be imported. Also caches the test modules that pytest rewrites, for all later processes.
check-tests: $(READY)
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --collect-only -qq > $(VENV)/tests.txt || { cat $(VENV)/tests.txt; exit 1; }

format: $(READY)
	$(BIN)/ruff format src tests benchmarks examples
	$(BIN)/ruff check --fix src tests benchmarks examples

# Writes the generated tables of README and docs from the committed result files.
figures: $(READY)
	$(BIN)/python benchmarks/tables.py
	$(BIN)/python benchmarks/claims.py
	$(BIN)/python benchmarks/model_tables.py

# Writes every table of the committed results as HTML: the docs have the short ones.
tables: $(READY)
	$(BIN)/python benchmarks/full_tables.py

# Changes COUNT random operators in src, one at a time, and counts how many of them the tests notice. Not part of CI.
SEED ?= 0
COUNT ?= 25
PATHS ?= src/redline
mutants: $(READY)
	$(BIN)/python benchmarks/mutants.py --seed $(SEED) --count $(COUNT) $(PATHS)

# Not compiled to bytecode: tests of packages, and most models of transformers and diffusers, which are never imported.
UNUSED := site-packages/(.*/tests/|transformers/models/(?!auto|clip|gpt2|llama)\w+/|diffusers/pipelines/(?!stable_diffusion/)\w+/)
# Large packages that torch does not depend on: installed at the same time as torch, because one pip uses one core.
LARGE := av diffusers onnx onnxruntime "openvino; platform_machine == 'x86_64'" pyarrow pyrefly ruff transformers
# A new pip resolves dependencies in half of the time. Bytecode is compiled on all cores, where pip would use one, and
# that of torch while pip installs the other packages. Some packages contain files for other versions of Python.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --no-compile --quiet --upgrade pip || true
	$(BIN)/pip install --no-compile --quiet --constraint constraints.txt --no-deps $(LARGE) & \
	$(BIN)/pip install --no-compile --quiet --constraint constraints.txt torch "setuptools>=77" "pyvips[binary]" && wait $$!
	$(BIN)/python -m compileall -qq -x '$(UNUSED)' $(VENV)/lib & \
	$(BIN)/pip install --no-compile --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev]" && wait
	$(BIN)/python -m compileall -qq -j 0 -x '$(UNUSED)' $(VENV)/lib src || true
	touch $(READY)

clean:
	rm -rf $(VENV) redline-out .pytest_cache .ruff_cache
