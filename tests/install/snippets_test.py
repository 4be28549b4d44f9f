#!/usr/bin/env python3
"""Checks that public headers, and the C++ and C in the documentation, compile with -Wall -Wextra -Werror.

Usage: snippets_test.py COMPILER SOURCE_DIR WORK_DIR

 - every header of include/crossdock, alone
 - every ```cpp block of README.md and docs/*.md: a whole program, or statements
 - every ```c block there, as C99
 - every call in `backticks` there, such as `plan.segments()`, except those with "..." or on pages about Python

Statements and calls can use the names of snippet_context.hpp, in C those of snippet_context.h. Nothing is linked or run.
"""
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys

# Structs that a caller makes; the others are results.
GIVEN = re.compile(r"struct (?:CROSSDOCK_API )?(\w*(?:Args|Config|Options|Weights|Gradients|Routing|Inputs?|Counts|Update|Segments))\b.*{$")
FLAGS = ["-Wall", "-Wextra", "-Wno-unused-variable", "-Werror", "-fsyntax-only"]  # a fragment need not use its variables
PYTHON_PAGES = {
    *("checkpoints", "python", "pytorch", "megatron", "torchtitan", "training", "transformers"),
    *("coming_from", "inference", "troubleshooting", "tuning", "tutorial"),
}
LANGUAGES = {".cpp": ["-std=c++20"], ".c": ["-x", "c", "-std=c99", "-pedantic"]}
CALL = re.compile(r"`([a-z_]+(?:\.[a-z_]+)+\([^`]*\))`")
MEMBER = re.compile(r"^  +(?!using|friend|static|return|explicit|virtual)(?:[\w:<>, *]+ )?\w+;")


def blocks(language, text):
    """(line, code) of every fenced block of a language."""
    for block in re.finditer(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, block.start()) + 2, block.group(1)


def inline_calls(text):
    """(line, code) of every call in backticks."""
    for number, line in enumerate(text.splitlines(), 1):
        for call in CALL.findall(line):
            if "..." not in call:
                yield number, f"static_cast<void>({call});\n"


def write_units(source, work):
    """Writes one file per header and program, and one per page with its fragments. Returns them."""
    units = []
    for header in sorted((source / "include/crossdock").rglob("*.hpp")):
        name = header.relative_to(source / "include").as_posix()
        units.append((f"header_{header.stem}.cpp", f"#include <{name}>\n"))
    num_fragments = 0
    for page in [source / "README.md", *sorted((source / "docs").glob("*.md"))]:
        text = page.read_text()
        fragments = []
        calls = () if page.stem in PYTHON_PAGES else inline_calls(text)
        for line, code in [*blocks("cpp", text), *calls]:
            located = f'#line {line} "{page.relative_to(source)}"\n{code}'
            if "int main(" in code:
                units.append((f"{page.stem}_program_{line}.cpp", located))
            else:
                fragments.append(f"void fragment_{line}_{len(fragments)}() {{\n{located}}}\n")
        num_fragments += len(fragments)
        if fragments:
            units.append((f"{page.stem}_fragments.cpp", '#include "snippet_context.hpp"\n' + "".join(fragments)))
        for line, code in blocks("c", text):
            located = f'#line {line} "{page.relative_to(source)}"\n{code}'
            units.append((f"{page.stem}_{line}.c", f'#include "snippet_context.h"\nvoid fragment(void) {{\n{located}}}\n'))
    assert num_fragments >= 8, f"only {num_fragments} pieces of C++ were found in the documentation"
    work.mkdir(parents=True, exist_ok=True)
    files = []
    for name, code in units:
        files.append(work / name)
        files[-1].write_text(code)
    return files


def members_without_default(source):
    """Callers make structs with designated initializers, which warn about members without a default."""
    found = []
    for header in sorted((source / "include/crossdock").rglob("*.hpp")):
        struct = None
        for number, line in enumerate(header.read_text().splitlines(), 1):
            opened = GIVEN.match(line)
            if opened:
                struct = opened.group(1)
            elif line == "};":
                struct = None
            elif struct and MEMBER.match(line):
                found.append(f"{header.name}:{number}: {struct}:{line.split('//')[0].rstrip()} needs = {{}}")
    return found


def compile_unit(compiler, source, file):
    command = [compiler, *LANGUAGES[file.suffix], *FLAGS, f"-I{source / 'include'}", f"-I{source / 'tests/install'}", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"{file.name}:\n{done.stderr}"


def main():
    compiler, source, work = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
    files = write_units(source, work)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        failures = [text for text in pool.map(lambda file: compile_unit(compiler, source, file), files) if text]
    failures += members_without_default(source)
    print("\n".join(failures))
    print(f"{len(files)} files, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
