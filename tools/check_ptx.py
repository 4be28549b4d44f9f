#!/usr/bin/env python3
"""Checks that GPUs newer than those a library was compiled for can run its kernels.

    tools/check_ptx.py build/cuda/libcrossdock.a

Machine code runs on one generation of GPUs; on later ones the driver compiles PTX, unless the PTX is specific to one
architecture (sm_90a, sm_100f). So every group of kernels must have portable PTX at least as new as its newest machine
code.
"""
import struct
import sys
from typing import NamedTuple

# Contents of .nv_fatbin: a header, then entries of PTX or machine code, each with its own header.
MAGIC = struct.pack("<I", 0xBA55ED50)
HEADER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of the entries
ENTRY = struct.Struct("<HHIQ12xI8xQ")  # kind, version, bytes of this header, bytes of the content, architecture, flags
PTX, MACHINE_CODE = 1, 2
ONE_ARCHITECTURE = 0x300000  # flags: PTX of sm_XXa or sm_XXf


class Entry(NamedTuple):
    """PTX or machine code of a group of kernels."""

    kind: int
    architecture: int
    is_portable: bool  # not specific to one architecture
    at: int  # offset of its content in the library
    content: bytes


def read_entries(data, begin):
    """Yields the entries of the group of kernels at `begin`."""
    _, _, header_bytes, content_bytes = HEADER.unpack_from(data, begin)
    at = begin + header_bytes
    end = at + content_bytes
    while at < end:
        kind, _, header_bytes, content_bytes, architecture, flags = ENTRY.unpack_from(data, at)
        if header_bytes < ENTRY.size:
            raise ValueError(f"byte {at}: unknown layout of kernels")
        at += header_bytes
        yield Entry(kind, architecture, flags & ONE_ARCHITECTURE == 0, at, data[at:at + content_bytes])
        at += content_bytes


def read_groups(data):
    """Yields (offset, entries) of every group of kernels in a library."""
    begin = data.find(MAGIC)
    while begin >= 0:
        yield begin, list(read_entries(data, begin))
        begin = data.find(MAGIC, begin + 1)


def flaws(data):
    found = []
    groups = 0
    for begin, entries in read_groups(data):
        code = max((entry.architecture for entry in entries if entry.kind == MACHINE_CODE), default=0)
        ptx = max((entry.architecture for entry in entries if entry.kind == PTX and entry.is_portable), default=0)
        groups += 1
        if ptx == 0:
            found.append(f"kernels at byte {begin}: machine code for sm_{code}, no portable PTX")
        elif ptx < code:
            found.append(f"kernels at byte {begin}: machine code for sm_{code}, portable PTX only of compute_{ptx}")
    if groups == 0:
        found.append("no kernels")
    return found, groups


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    path = sys.argv[1]
    with open(path, "rb") as file:
        found, groups = flaws(file.read())
    for flaw in found:
        print(f"{path}: {flaw}")
    if found:
        sys.exit("Later GPUs cannot run this library well: add an architecture like 90-virtual to "
                 "CMAKE_CUDA_ARCHITECTURES.")
    print(f"{path}: {groups} groups of kernels, all with portable PTX for later GPUs")


if __name__ == "__main__":
    main()
