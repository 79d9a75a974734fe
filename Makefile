# make serve      set up .venv and serve the bundled model (TORCH=cpu or TORCH=cuda chooses PyTorch's build)
# make test       set up .venv, then format, lint, types and the tests that every change must pass (5 minutes on 2 cores)
# make test-all   the same with every test (25 minutes)
# make test-clients  the clients of docs/clients.md, which it installs (tests/clients/requirements, npm)
# make sanitize   the native kernels under AddressSanitizer and UBSan

PYTHON ?= python3
CXX ?= g++
TORCH ?= auto
VENV ?= .venv
BIN := $(VENV)/bin
# Bytecode beside the environment: each process of a test imports a third of the time.
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/pycache
export PYTHONDONTWRITEBYTECODE :=
INSTALL = PYTHON=$(PYTHON) CXX="$(CXX)" TORCH=$(TORCH) packaging/install.sh $(VENV)
CHECKS = $(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy

.PHONY: serve test test-all test-clients setup clean native sanitize

serve: $(VENV)/installed  ## set up and serve the bundled model
	$(BIN)/foreword serve

test: $(VENV)/tested  ## set up, then format, lint, types and tests
	$(CHECKS)
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-all: $(VENV)/tested-all  ## the same with every test
	$(CHECKS)
	$(BIN)/python -m pytest -n 2 --dist worksteal --full

# Versions of openai that exclude each other, and Node, in environments of their own.
CLIENTS := $(abspath .venv-clients)
test-clients: $(VENV)/tested $(CLIENTS)/openai2/installed $(CLIENTS)/openai3/installed $(CLIENTS)/node/installed
	FOREWORD_CLIENTS_PYTHON=$(CLIENTS)/openai2/bin/python:$(CLIENTS)/openai3/bin/python \
	FOREWORD_CLIENTS_NODE=$(CLIENTS)/node $(BIN)/python -m pytest tests/clients

setup: $(VENV)/tested-all  ## everything for development

# Editable, so that the package's own build compiles the native library.
SOURCES := pyproject.toml setup.py packaging/install.sh $(wildcard foreword/kernels/csrc/*/*)

$(VENV)/installed: $(SOURCES)
	@$(INSTALL) .
	@touch $@

$(VENV)/tested: $(SOURCES)
	@$(INSTALL) ".[test]"
	@touch $@ $(VENV)/installed

$(VENV)/tested-all: $(SOURCES)
	@$(INSTALL) ".[test-all]"
	@touch $@ $(VENV)/tested $(VENV)/installed

# Installed without a compiler: built as soon as there is one.
ifeq ($(wildcard foreword/kernels/_native*.so),)
ifneq ($(shell command -v $(CXX)),)
.PHONY: $(VENV)/installed $(VENV)/tested $(VENV)/tested-all
endif
endif

$(CLIENTS)/%/installed: tests/clients/requirements/%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --no-compile -r $<
	@touch $@

$(CLIENTS)/node/installed: tests/clients/package.json
	@mkdir -p $(@D) && cp $< $(@D)
	@if command -v npm >/dev/null; then npm install --no-audit --no-fund --prefix $(@D) && touch $@; \
	else echo "note: no npm (Debian: apt install npm), so Node's clients are skipped"; fi

clean:
	rm -rf $(VENV) $(CLIENTS) build *.egg-info foreword/kernels/_native*.so

# The same library with an object for each source, so that only what changed is compiled (needs g++ only).
NATIVE_FLAGS := -O3 -g0 -std=c++17 -pthread -ffp-contract=off -fno-math-errno -fno-trapping-math
NATIVE_OBJECTS := $(patsubst foreword/kernels/csrc/%.cpp,build/native/%.o,$(wildcard foreword/kernels/csrc/*/*.cpp))

native: foreword/kernels/_native.so  ## build the native kernels in place

foreword/kernels/_native.so: $(NATIVE_OBJECTS)
	$(CXX) -shared -pthread -o $@.new $^ && mv $@.new $@

build/native/%.o: foreword/kernels/csrc/%.cpp
	@mkdir -p $(@D)
	$(CXX) -c -fPIC -MMD -MP -Iforeword/kernels/csrc $(NATIVE_FLAGS) -o $@ $<

# The same sources with AddressSanitizer and UBSan, under the tests that call them most, and the threads' pool with
# ThreadSanitizer; a report ends the run (needs g++).
# Leaks are Python's to tell. Of two tests one limits the address space and one looks for a library that is not named.
SANITIZED := build/sanitized/native.so
SANITIZED_OBJECTS := $(patsubst build/native/%,build/sanitized/%,$(NATIVE_OBJECTS))
SANITIZER_FLAGS := $(filter-out -O3,$(NATIVE_FLAGS)) -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined \
	-fno-omit-frame-pointer
SANITIZED_TESTS := tests/kernels tests/sampling tests/speculation/drafters/test_suffix.py tests/speculation/drafters/test_text.py \
	tests/speculation/drafters/test_draft_model.py \
	tests/weights/test_gguf.py tests/weights/test_gguf_header.py tests/weights/test_gguf_values.py \
	tests/benchmarks/test_fuzz_checkpoints.py

sanitize: $(SANITIZED) build/sanitized/pool_race $(VENV)/tested-all  ## the native kernels under sanitizers
	TSAN_OPTIONS=halt_on_error=1 build/sanitized/pool_race
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:abort_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	PYTHONMALLOC=malloc FOREWORD_NATIVE=$(abspath $(SANITIZED)) \
	$(BIN)/python -m pytest --full --capture=sys -q $(SANITIZED_TESTS) \
	--deselect tests/kernels/test_cpu_process.py::test_refused_threads_are_reported \
	--deselect tests/kernels/test_cpu_library.py::test_library_is_not_older_than_its_sources

$(SANITIZED): $(SANITIZED_OBJECTS)
	$(CXX) -shared -pthread -fsanitize=address,undefined -o $@ $^

build/sanitized/pool_race: tests/kernels/pool_race.cpp foreword/kernels/csrc/common/thread_pool.cpp foreword/kernels/csrc/common/thread_pool.h
	@mkdir -p $(@D)
	$(CXX) -std=c++17 -O1 -g1 -pthread -fsanitize=thread -Iforeword/kernels/csrc -o $@ $(filter %.cpp,$^)

build/sanitized/%.o: foreword/kernels/csrc/%.cpp
	@mkdir -p $(@D)
	$(CXX) -c -fPIC -MMD -MP -Iforeword/kernels/csrc $(SANITIZER_FLAGS) -o $@ $<

-include $(NATIVE_OBJECTS:.o=.d) $(SANITIZED_OBJECTS:.o=.d)
