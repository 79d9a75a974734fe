# make serve   set up .venv and serve the bundled model
# make test    set up .venv and run every check

PYTHON ?= python3
CXX ?= g++
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: serve test check setup clean native

serve: $(VENV)/installed  ## set up and serve the bundled model
	$(BIN)/foreword serve

test: $(VENV)/tested  ## set up, then format, lint, types and tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile

setup: $(VENV)/tested  ## everything for development

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Installed in place: the native sampler is built by the package's own build.
$(VENV)/installed: $(BIN)/python pyproject.toml $(wildcard foreword/kernels/csrc/*)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --progress-bar on --editable .
	touch $@

$(VENV)/tested: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --progress-bar on --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info foreword/kernels/_native*.so

# The same library with an object for each source, so that only what changed is compiled (needs g++ only).
NATIVE_FLAGS := -O3 -std=c++17 -pthread -ffp-contract=off -fno-math-errno -fno-trapping-math
NATIVE_OBJECTS := $(patsubst foreword/kernels/csrc/%.cpp,build/native/%.o,$(wildcard foreword/kernels/csrc/*.cpp))

native: foreword/kernels/_native.so  ## build the native kernels in place

foreword/kernels/_native.so: $(NATIVE_OBJECTS)
	$(CXX) -shared -pthread -o $@.new $^ && mv $@.new $@

build/native/%.o: foreword/kernels/csrc/%.cpp
	@mkdir -p $(@D)
	$(CXX) -c -fPIC -MMD -MP $(NATIVE_FLAGS) -o $@ $<

-include $(NATIVE_OBJECTS:.o=.d)
