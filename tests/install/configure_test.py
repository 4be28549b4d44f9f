#!/usr/bin/env python3
"""What CMake decides for settings that are "auto", as in `pip install .`, and what it says.

Usage: configure_test.py SOURCE_DIR WORK_DIR
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys

DEADLINE = 300  # seconds
QUICK = ["-DCROSSDOCK_BUILD_TESTS=OFF", "-DCROSSDOCK_BUILD_EXAMPLES=OFF", "-DCROSSDOCK_WITH_MPI=OFF"]


class Configured:
    def __init__(self, source, work, *settings, **environment):
        shutil.rmtree(work, ignore_errors=True)
        command = ["cmake", "-S", source, "-B", work, *QUICK, *settings]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False,
                              env={**os.environ, **environment})
        self.succeeded = done.returncode == 0
        self.text = " ".join((done.stdout + done.stderr).split())
        info = work / "generated/core/build_info.hpp"
        self.info = info.read_text() if info.exists() else ""

    def expect(self, succeeded, *parts):
        for part in parts:
            assert part in self.text or part in self.info, f"'{part}' is not in:\n{self.text}\n{self.info}"
        assert self.succeeded == succeeded, self.text


def fake_nvcc(work, version):
    nvcc = work / f"nvcc-{version}"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.1'\n")
    nvcc.chmod(0o755)
    return str(nvcc)


def main():
    source, work = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
    work.mkdir(parents=True, exist_ok=True)
    auto = ["-DCROSSDOCK_WITH_CUDA=auto", "-DCROSSDOCK_BUILD_CLI=auto"]

    without = Configured(source, work / "without", *auto, "-DCMAKE_DISABLE_FIND_PACKAGE_CLI11=ON",
                         CUDACXX=fake_nvcc(work, "12.4"))
    without.expect(True, "kWithCuda = 0 != 0", "is of CUDA 12.4, must be 13.0 or later",
                   "The command crossdock is left out", "libcli11-dev nlohmann-json3-dev", "crossdock: command OFF")
    Configured(source, work / "missing", *auto, CUDACXX="/nowhere/nvcc").expect(
        True, "kWithCuda = 0 != 0", "/nowhere/nvcc does not run", "crossdock: command ON")
    Configured(source, work / "typo", "-DCROSSDOCK_WITH_CUDA=maybe").expect(False, "must be auto, on or off, is 'maybe'")

    version = re.search(r'CROSSDOCK_VERSION "(.*)"', (source / "include/crossdock/version.h").read_text()).group(1)
    without.expect(True, f'kVersion = "{version}"')

    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if pathlib.Path(nvcc).exists():
        Configured(source, work / "with", *auto, CUDACXX=nvcc).expect(True, "kWithCuda = 1 != 0", "for architectures ")
    else:
        print("configure_test: without nvcc on this machine, that it is used is not tested")
    print("configure_test: ok")


if __name__ == "__main__":
    main()
