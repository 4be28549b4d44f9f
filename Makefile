# Thin wrappers around the CMake presets: every command here can be typed by hand.
JOBS ?= $(shell nproc)
TEST_JOBS ?= $(shell expr 3 \* $(JOBS))  # most tests wait for ranks more than they compute
NVCC := $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
PYTHON ?= $(or $(wildcard /usr/bin/python3),python3)  # Debian's, for which tools/setup.sh installs packages
PIP ?= python3 -m pip
DEMO ?= build/release/crossdock run --preset qwen3-30b-a3b --ranks 4
# The library and the command, without tests and examples.
BUILD_COMMAND = cmake --preset release -DCROSSDOCK_BUILD_TESTS=OFF -DCROSSDOCK_BUILD_EXAMPLES=OFF && \
                cmake --build --preset release -j $(JOBS)

.DEFAULT_GOAL := all
.PHONY: all demo test test-quick test-sanitizers lint lint-full format bench python test-python wheel test-wheel wheels deb test-deb deps fuzz test-torch test-torch-quick test-training test-transformers frameworks cuda cuda-release test-cuda follow-token install clean help

deps:  ## install what `make demo` and `make test` need, and nothing else
	tools/setup.sh build mpi test

all:  ## build everything; installs missing packages first
	tools/setup.sh build mpi test
	cmake --preset release
	cmake --build --preset release -j $(JOBS)

demo:  ## build the command, with MPI, and run a layer on 4 ranks, checked
	tools/setup.sh build mpi
	$(BUILD_COMMAND)
	$(DEMO)

test: all  ## build, run every C++ and C test, check the docs
	ctest --preset release -j $(TEST_JOBS)

test-quick: all  ## run the unit tests only, under a minute
	ctest --preset release -j $(TEST_JOBS) -L unit

test-sanitizers: test-asan test-tsan  ## run unit tests under ASan and UBSan, some under TSan

.PHONY: test-asan test-tsan
test-asan test-tsan: test-%:
	tools/setup.sh build mpi test
	cmake --preset $*
	cmake --build --preset $* -j $(JOBS) --target quick_tests
	ctest --preset $* -j $(TEST_JOBS) -L unit

FUZZ_SECONDS ?= 10
fuzz:  ## look for inputs that crash, FUZZ_SECONDS for each of the targets in tests/fuzz (clang)
	tools/setup.sh build test fuzz
	cmake --preset fuzz
	cmake --build --preset fuzz -j $(JOBS)
	tests/fuzz/run.py build/fuzz $(FUZZ_SECONDS)

python:  ## build for the Python package in python/; use it with PYTHONPATH=python
	tools/setup.sh build python
	cmake --preset python
	cmake --build --preset python -j $(JOBS)

test-python: python  ## run the tests of the Python package
	PYTHONPATH=python $(PYTHON) -B -m pytest -q -p no:cacheprovider tests/python

wheel:  ## build a wheel in build/wheel, with pip and what it downloads
	tools/setup.sh build python
	CXX=$${CXX:-c++} $(PIP) wheel . --no-deps --wheel-dir build/wheel $(WHEEL_OPTIONS)

# Same flags and compiler as make python, to get the objects from the compiler cache.
test-wheel: WHEEL_OPTIONS = --config-settings=cmake.define.CROSSDOCK_WERROR=ON
test-wheel: export CROSSDOCK_CUDA ?= off
test-wheel: wheel  ## install the wheel in a new virtual environment and run the tests of the Python package there
	rm -rf build/wheel/venv && python3 -m venv build/wheel/venv
	build/wheel/venv/bin/pip install -q build/wheel/crossdock-*.whl numpy pytest
	CROSSDOCK_TEST_INSTALLED=1 build/wheel/venv/bin/python -B -m pytest -q -p no:cacheprovider tests/python
	build/wheel/venv/bin/crossdock info

WHEELS ?= cpu $(if $(NVCC),cu13)
WHEEL_ARCHITECTURES ?= 80-real;90a-real;100a-real;100-virtual
wheels:  ## build and test wheels for other machines, in build/wheels/dist: CPU and, with nvcc, CUDA (long)
	tools/setup.sh build python
	CXX=$${CXX:-c++} tools/wheels.py --jobs $(JOBS) --architectures '$(WHEEL_ARCHITECTURES)' $(WHEELS)

deb:  ## build a Debian package of library, headers and command, in build/deb
	tools/setup.sh build mpi packages
	cmake --preset deb
	cmake --build --preset deb -j $(JOBS)
	cd build/deb && cpack -G DEB

test-deb:  ## build the Debian package, install it in a new Debian and use it there (root, slow)
	tools/setup.sh build mpi packages
	CROSSDOCK_TEST_DEB=1 tests/install/deb_test.py .

test-torch: python build/torch/installed  ## run the tests of crossdock.torch, also in Megatron and torchtitan
	PYTHONPATH=python $(TORCH_PYTHON) -B tests/torch/run.py --sets quick torch megatron titan
	PYTHONPATH=python $(TORCH_PYTHON) -B tests/torch/failures.py
	PYTHONPATH=python $(TORCH_PYTHON) -B tests/torch/readme.py
	PYTHONPATH=python $(TORCH_PYTHON) -B tests/torch/typed.py

test-torch-quick: python  ## run some of them with Debian's torch
	tools/setup.sh torch
	PYTHONPATH=python $(PYTHON) -B tests/torch/run.py --sets quick

test-training: python build/torch/installed  ## train a small transformer on meshes, against one rank
	PYTHONPATH=python $(TORCH_PYTHON) -B tests/training/run.py

test-transformers: python build/torch/transformers  ## run the tests of crossdock.transformers, with 5.23 and 5.20
	PYTHONPATH=python $(TORCH_PYTHON) -B tests/torch/run.py --sets transformers transformers-parallel
	PYTHONPATH=python:$(OLD_TRANSFORMERS) $(TORCH_PYTHON) -B tests/torch/run.py --sets transformers
	PYTHONPATH=python $(TORCH_PYTHON) -B tests/torch/hf_runs.py

# Some virtual machines announce AMX but refuse its instructions, which torch's products in bf16 would use.
test-torch test-torch-quick test-training test-transformers: export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

# PyPI's torch and the frameworks: 2.7 GB to download, 4.7 GB on the disk.
TORCH_PYTHON = build/torch/bin/python
MEGATRON = megatron-core==0.16.1
TITAN = torchtitan==0.3.0 spmd_types==0.2.3
build/torch/installed: tests/torch/requirements.txt
	tools/setup.sh python
	python3 -m venv build/torch
	$(TORCH_PYTHON) -m pip install -q -r $< $(MEGATRON)
	$(TORCH_PYTHON) -m pip install -q --no-deps $(TITAN)
	touch $@

# The newest transformers, and the oldest that has an interface for experts, in a folder of its own.
OLD_TRANSFORMERS = build/torch/old-transformers
build/torch/transformers: build/torch/installed
	$(TORCH_PYTHON) -m pip install -q transformers==5.23.0 accelerate peft==0.21.2
	$(TORCH_PYTHON) -m pip install -q --no-deps --target $(OLD_TRANSFORMERS) transformers==5.20.0
	touch $@

FRAMEWORKS_PYTHON ?= 3.12
frameworks:  ## unpack the frameworks in build/frameworks, for a GPU machine that has torch and no network
	rm -rf build/frameworks
	$(PIP) install -q --no-deps --no-compile --only-binary=:all: --python-version $(FRAMEWORKS_PYTHON) --target build/frameworks \
	  $(MEGATRON) $(TITAN) einops tyro docstring-parser typeguard packaging

lint:  ## check format and layers, run clang-tidy
	tools/setup.sh build mpi test lint
	cmake --preset lint
	$(if $(NVCC),cmake --preset lint-cuda)
	tools/lint.py --jobs $(JOBS) $(LINT_OPTIONS)

lint-full: LINT_OPTIONS = --full
lint-full: lint  ## lint with the static analyzer (slow), before a release

format:  ## format the sources
	tools/setup.sh lint
	tools/lint.py --fix format

bench:  ## build the command and run the default benchmarks
	tools/setup.sh build mpi bench
	cmake --preset release
	cmake --build --preset release -j $(JOBS) --target crossdock_cli
	build/release/crossdock bench

cuda:  ## compile for GPUs (needs nvcc, no GPU)
	cmake --preset cuda
	cmake --build --preset cuda -j $(JOBS) --target cuda_tests crossdock_cli
	tools/check_ptx.py build/cuda/libcrossdock.a
	tools/check_spills.py build/cuda/libcrossdock.a hopper

cuda-release:  ## compile for every supported GPU, before a release
	cmake --preset cuda-release
	cmake --build --preset cuda-release -j $(JOBS) --target crossdock_library
	tools/check_ptx.py build/cuda-release/libcrossdock.a
	tools/check_spills.py build/cuda-release/libcrossdock.a hopper

test-cuda: cuda  ## run the tests that need a GPU
	ctest --preset cuda -L cuda

follow-token:  ## check the list of files under "Follow one token" in docs/architecture.md against a run
	cmake --preset coverage
	cmake --build --preset coverage -j $(JOBS) --target follow_token
	tools/follow_token.py build/coverage

install:  ## build library and command, install in PREFIX (/usr/local)
	tools/setup.sh build
	$(BUILD_COMMAND)
	cmake --install build/release $(if $(PREFIX),--prefix $(PREFIX))

clean:  ## remove build/
	rm -rf build

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 18
