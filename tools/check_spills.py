#!/usr/bin/env python3
"""Checks that kernels which must keep everything in registers do so.

    tools/check_spills.py build/cuda/libcrossdock.a hopper

Fails if a kernel whose mangled name contains one of the words has a stack: spilled registers or an array in local memory. Reads the machine code in the library, so it needs no GPU and no CUDA.
"""
import struct
import sys

from check_ptx import MACHINE_CODE, read_groups

# Machine code is an ELF file. Its section .nv.info has attributes: a format, a kind and, in the format used here, the
# number of bytes that follow: the symbol index of the kernel, and the value.
ELF_MAGIC = b"\x7fELF"
SECTION = struct.Struct("<IIQQQQIIQQ")  # name, kind, flags, address, offset, bytes, link, info, alignment, entry bytes
SYMBOL = struct.Struct("<IBBHQQ")
SYMBOL_TABLE = 2
WITH_SIZE = 4  # a format; in other formats the value replaces the number of bytes
FRAME_SIZE, REGISTERS = 0x11, 0x2F  # kinds


def machine_codes(data):
    """Yields (architecture, ELF file) of all kernels in a library."""
    for _, entries in read_groups(data):
        for entry in entries:
            if entry.kind != MACHINE_CODE:
                continue
            if not entry.content.startswith(ELF_MAGIC):
                raise ValueError(f"byte {entry.at}: machine code is compressed or has an unknown layout")
            yield entry.architecture, entry.content


def text_at(data, offset):
    return data[offset:data.index(b"\0", offset)].decode()


def sections_of(elf):
    """(name, header) of every section, in order."""
    offset, = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [SECTION.unpack_from(elf, offset + i * size) for i in range(count)]
    return [(text_at(elf, headers[names][4] + header[0]), header) for header in headers]


def attributes_of(elf):
    """Yields (kind, symbol, value) of all attributes of .nv.info that have both."""
    sections = sections_of(elf)
    table = next(header for _, header in sections if header[1] == SYMBOL_TABLE)
    strings = sections[table[6]][1][4]
    at, num_bytes = next(header[4:6] for name, header in sections if name == ".nv.info")
    end = at + num_bytes
    while at < end:
        form, kind, value = struct.unpack_from("<BBH", elf, at)
        at += 4
        if form != WITH_SIZE:
            continue
        if value == 8:
            symbol, number = struct.unpack_from("<II", elf, at)
            name, *_ = SYMBOL.unpack_from(elf, table[4] + symbol * SYMBOL.size)
            yield kind, text_at(elf, strings + name), number
        at += value


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    path, words = sys.argv[1], sys.argv[2:]
    with open(path, "rb") as file:
        data = file.read()
    frames, registers = {}, {}
    for architecture, elf in machine_codes(data):
        for kind, name, number in attributes_of(elf):
            if any(word in name for word in words) and kind in (FRAME_SIZE, REGISTERS):
                (frames if kind == FRAME_SIZE else registers)[name, architecture] = number
    for (name, architecture), num_bytes in frames.items():
        if num_bytes > 0:
            print(f"{path}: {name} for sm_{architecture} has {num_bytes} bytes of stack")
    if not frames:
        sys.exit(f"{path}: no kernel is called {' or '.join(words)}")
    if any(frames.values()):
        sys.exit("Kernels that wait for each other's warps must not spill: use fewer registers there.")
    print(f"{path}: {len(frames)} kernels without a stack, with up to {max(registers.values())} registers")


if __name__ == "__main__":
    main()
