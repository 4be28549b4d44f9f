# Thin wrappers over the CMake presets: everything here can be typed by hand.
JOBS ?= $(shell nproc)
TEST_JOBS ?= $(shell expr 2 \* $(JOBS))  # most tests wait for ranks rather than compute
NVCC := $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
DEMO ?= build/release/crossdock run --preset qwen3-30b-a3b --ranks 4

.DEFAULT_GOAL := all
.PHONY: all demo test test-quick test-sanitizers lint lint-full format bench cuda cuda-release test-cuda install clean help

all:  ## install what is missing, build library, command, tests and examples
	tools/setup.sh build test
	cmake --preset release
	cmake --build --preset release -j $(JOBS)

demo:  ## install the least, build the command, run a layer on 4 ranks, checked
	tools/setup.sh build
	cmake --preset release -DCROSSDOCK_BUILD_TESTS=OFF -DCROSSDOCK_BUILD_EXAMPLES=OFF
	cmake --build --preset release -j $(JOBS)
	$(DEMO)

test: all  ## build and run every test
	ctest --preset release -j $(TEST_JOBS)

test-quick: all  ## the unit tests alone, under a minute
	ctest --preset release -j $(TEST_JOBS) -L unit

test-sanitizers: test-asan test-tsan  ## quick tests under ASan + UBSan, then those with threads under TSan

.PHONY: test-asan test-tsan
test-asan test-tsan: test-%:
	tools/setup.sh build test
	cmake --preset $*
	cmake --build --preset $* -j $(JOBS) --target quick_tests
	ctest --preset $* -j $(TEST_JOBS) -L unit

lint:  ## format, clang-tidy (CUDA host sources too where there is nvcc), layers
	tools/setup.sh build test lint
	cmake --preset release
	$(if $(NVCC),cmake --preset cuda)
	tools/lint.py --jobs $(JOBS) $(LINT_OPTIONS)

lint-full: LINT_OPTIONS = --full
lint-full: lint  ## lint with the static analyzer as well: before a release; takes much longer

format:  ## rewrite the sources in the project's format
	tools/setup.sh lint
	tools/lint.py --fix format

bench:  ## build the command and run the default benchmarks
	tools/setup.sh build bench
	cmake --preset release
	cmake --build --preset release -j $(JOBS) --target crossdock_cli
	build/release/crossdock bench

cuda:  ## compile library, command and tests for GPUs (needs nvcc, no GPU)
	cmake --preset cuda
	cmake --build --preset cuda -j $(JOBS) --target cuda_tests crossdock_cli
	tools/check_ptx.py build/cuda/libcrossdock.a

cuda-release:  ## before a release: compile the library for every GPU generation it is for
	cmake --preset cuda-release
	cmake --build --preset cuda-release -j $(JOBS) --target crossdock_library
	tools/check_ptx.py build/cuda-release/libcrossdock.a

test-cuda: cuda  ## on a machine with a GPU: run the tests labelled cuda
	ctest --preset cuda -L cuda

install: all  ## install under PREFIX (default: /usr/local)
	cmake --install build/release $(if $(PREFIX),--prefix $(PREFIX))

clean:  ## remove build/
	rm -rf build

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 18
