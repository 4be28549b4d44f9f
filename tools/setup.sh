#!/usr/bin/env bash
# Installs the missing Debian packages for the given purposes, with apt, as root or with sudo.
#   tools/setup.sh [build] [mpi] [test] [lint] [bench] [python] [torch] [packages] [fuzz]      (default: all)
# Without root or sudo it prints the command to run and fails. CROSSDOCK_SKIP_SETUP=1 disables it, for machines whose
# tools do not come from apt; CMake then reports what is missing.
set -euo pipefail

build="g++ cmake ninja-build libcli11-dev nlohmann-json3-dev"  # the library and the command
mpi="libopenmpi-dev openmpi-bin"
test="ccache libgmock-dev librapidcheck-dev libopenblas-dev iproute2 python3"
lint="clang-format clang-tidy python3"
bench="libopenblas-dev"  # for comparison
python="python3 python3-dev python3-numpy python3-pytest python3-pip python3-venv"  # venv: for wheels and PyPI's torch
packages="dpkg-dev file debootstrap"  # .deb files and their test
# libFuzzer is in a package of clang's version, 14 if clang is yet to be installed on Debian 12.
clang_version=$(apt-cache show clang 2>/dev/null | sed -n 's/^Version: [0-9]*:\([0-9]*\).*/\1/p' | head -n 1) || true
fuzz="clang libclang-rt-${clang_version:-14}-dev"
torch="python3-torch"  # Debian's 1.13; tests of other versions install them from PyPI

[[ "${CROSSDOCK_SKIP_SETUP:-0}" == 1 ]] && exit 0

wanted=()
for purpose in "${@:-build mpi test lint bench python torch packages fuzz}"; do
  for name in $purpose; do
    case "$name" in
      build | mpi | test | lint | bench | python | torch | packages | fuzz) read -ra names <<<"${!name}" && wanted+=("${names[@]}") ;;
      *) echo "setup.sh: unknown purpose '$name', must be build, mpi, test, lint, bench, python, torch, packages or fuzz" >&2 && exit 2 ;;
    esac
  done
done

if ! command -v apt-get >/dev/null; then
  echo "setup.sh: apt-get is missing. Install what these Debian packages contain, then set CROSSDOCK_SKIP_SETUP=1:" >&2
  echo "  ${wanted[*]}" >&2
  exit 1
fi

# A tool may come from anywhere; a library must be installed as a package.
declare -A command_of=([g++]=g++ [ccache]=ccache [cmake]=cmake [ninja-build]=ninja [openmpi-bin]=mpirun [iproute2]=ip
  [clang-format]=clang-format [clang-tidy]=clang-tidy [python3]=python3)
missing=()
for package in "${wanted[@]}"; do
  tool=${command_of[$package]:-}
  [[ -n "$tool" ]] && command -v "$tool" >/dev/null && continue
  status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ "$status" == installed ]] || missing+=("$package")
done
[[ ${#missing[@]} -eq 0 ]] && exit 0

install="apt-get update -q && apt-get install -y -q --no-install-recommends ${missing[*]}"
if [[ $EUID -eq 0 ]]; then
  run=(env DEBIAN_FRONTEND=noninteractive sh -c)
elif command -v sudo >/dev/null && { [[ -t 0 ]] || sudo -n true 2>/dev/null; }; then
  run=(sudo env DEBIAN_FRONTEND=noninteractive sh -c)
else
  echo "setup.sh: packages are missing, and installing them needs root. Run this as root, then try again:" >&2
  echo "  $install" >&2
  exit 1
fi
echo "setup.sh: about to install with apt-get, for '${*:-everything}': ${missing[*]}"
echo "setup.sh: stop with Ctrl-C, or set CROSSDOCK_SKIP_SETUP=1 to use what is here"
[[ -t 1 ]] && sleep 5
if ! "${run[@]}" "$install"; then
  echo "setup.sh: the installation failed. Set CROSSDOCK_SKIP_SETUP=1 to continue without it." >&2
  exit 1
fi
