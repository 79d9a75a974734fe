PYTHON ?= python3
CXX ?= g++

.PHONY: native
native: foreword/kernels/_native.so  ## build the sampler in place (needs g++ only)

foreword/kernels/_native.so: $(wildcard foreword/kernels/csrc/*)
	$(CXX) -shared -fPIC -O3 -std=c++17 -ffp-contract=off -fno-math-errno -o $@ foreword/kernels/csrc/sampler.cpp
