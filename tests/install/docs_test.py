#!/usr/bin/env python3
"""Checks the claims in the documentation that can be checked automatically.

Usage: docs_test.py SOURCE_DIR

 - links between pages, and paths of files in `backticks`, exist
 - every environment variable that sources, tests or tools read is in docs/environment.md
 - the files that docs/architecture.md lists to follow one token are few and have at most 600 lines each; its table of
   who may include whom matches tools/check_layers.py
 - the version in pages is that of the headers
 - tables and plots of benchmarks match the raw results; pictures are what tools/diagrams.py draws
 - README.md has at most 150 lines, lines of prose end before 130 characters, table cells are short
 - docs/troubleshooting.md quotes at least 40 messages, each of which is in the sources
"""
import importlib
import pathlib
import re
import subprocess
import sys

LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
CODE = re.compile(r"^ {4}[^\n]*$|^```.*?^```", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"`((?:src|include|cli|bench|tests|tools|docs|cmake|examples|python)/[\w./-]*[\w/])`")
SOURCES = (".cpp", ".hpp", ".cu", ".cuh")
LITERAL = re.compile(r'"([A-Z][A-Z0-9]+(?:_\w+)?)"')
OWN_LITERAL = re.compile(r'"(CROSSDOCK_[A-Z_]+)"')
IN_SHELL = re.compile(r"\$\{(CROSSDOCK_[A-Z_]+):-")
STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"' + r"|'((?:[^'\\\n]|\\.)*)'")
QUOTED = ("src", "cli", "bench", "python", "cmake", "tools")  # where messages come from
ONLY_CODE = re.compile(r"`[^`]*`(?:, `[^`]*`)*")  # a command, or a list of names
MOST_LINES = 600
MOST_IN_A_CELL = 120
MOST_FILES = {"On the CPU": 10, "On a GPU": 11}


def pages(source):
    return [source / "README.md", source / "CONTRIBUTING.md", *sorted((source / "docs").glob("*.md")),
            *sorted((source / "bench/results").glob("*.md"))]


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_ends(source):
    for page in pages(source):
        text, name = page.read_text(), page.relative_to(source)
        for link, anchor in LINK.findall(CODE.sub("", text)):
            target = page.parent / link if link else page
            if "://" in link:
                continue
            if not target.exists():
                yield f"{name}: the link to {link} leads nowhere"
            elif anchor and anchor not in anchors(target):
                yield f"{name}: {target.name} has no heading #{anchor}"
        for path in PATH.findall(text):
            if not (source / path).exists() and not re.search(r"/x[._]", path):  # x stands for a name
                yield f"{name}: {path} does not exist"


def variables_read(source):
    """(file, name) of every environment variable that is read or set by name."""
    for top in ("src", "cli", "bench", "python", "tests", "tools"):
        for file in sorted((source / top).rglob("*")):
            text = file.read_text() if file.suffix in (*SOURCES, ".py", ".sh") else ""
            reads = file.suffix in SOURCES and re.search(r"getenv\(|environment_variable\(", text) and top != "tests"
            for pattern in (LITERAL if reads else OWN_LITERAL, IN_SHELL):
                yield from ((file.relative_to(source), name) for name in pattern.findall(text))


def undocumented_variables(source):
    page = (source / "docs/environment.md").read_text()
    found = list(variables_read(source))
    assert len(found) >= 8, f"only {len(found)} environment variables were found in the sources"
    return [f"{file}: {name} is missing from docs/environment.md" for file, name in found if f"`{name}`" not in page]


def path_of_a_token(source):
    page = (source / "docs/architecture.md").read_text()
    for heading, most in MOST_FILES.items():
        rows = re.search(rf"^\*\*{heading}.*?\n\n((?:\d+\. .*\n)+)", page, re.MULTILINE)
        files = re.findall(r"^\d+\. `([^`]+)`", rows.group(1), re.MULTILINE) if rows else []
        if not 1 <= len(files) <= most:
            yield f"docs/architecture.md: {heading}: {len(files)} files are listed, must be 1 to {most}"
        for file in files:
            num_lines = len((source / file).read_text().splitlines()) if (source / file).exists() else 0
            if not 1 <= num_lines <= MOST_LINES:
                yield f"docs/architecture.md: {file} has {num_lines} lines, must be there and have at most {MOST_LINES}"


def wrong_layers(source):
    page = (source / "docs/architecture.md").read_text().split("| folder | may include |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `([\w/]+)` \|(.*)\|$", page, re.MULTILINE)
    shown = {room: set(re.findall(r"`([\w/]+)`", others)) for room, others in rows}
    sys.path.insert(0, str(source / "tools"))
    may_see = importlib.import_module("check_layers").MAY_SEE
    for room in sorted(may_see.keys() | shown.keys()):
        if shown.get(room) != may_see.get(room):
            yield f"docs/architecture.md: {room} is not as in tools/check_layers.py: {sorted(may_see.get(room, []))}"


def stale_versions(source):
    """The version is in include/crossdock/version.h; some pages must repeat it."""
    version = re.search(r'CROSSDOCK_VERSION "(.*)"', (source / "include/crossdock/version.h").read_text()).group(1)
    minor = version.rpartition(".")[0]
    repeated = [(source / "CITATION.cff", r"^version: (\S+)$", version), (source / "CHANGELOG.md", r"^## (\S+)", version)]
    users = [*pages(source), source / "tests/install/consumer/CMakeLists.txt"]
    repeated += [(page, r"find_package\(crossdock ([\d.]+)", minor) for page in users if "find_package(crossdock " in page.read_text()]
    for file, pattern, expected in repeated:
        found = re.search(pattern, file.read_text(), re.MULTILINE)
        if not found or found.group(1) != expected:
            yield f"{file.relative_to(source)}: the version is {found and found.group(1)}, must be {expected}"


def complaints(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).splitlines() if done.returncode else []


def stale_benchmarks(source):
    return complaints(source / "tools/bench_page.py", "--check")


def stale_pictures(source):
    return complaints(source / "tools/diagrams.py", "--check")


def long_lines(source):
    yield from complaints(source / "tools/wrap_docs.py", "--check")
    num_lines = len((source / "README.md").read_text().splitlines())
    if num_lines > 150:
        yield f"README.md has {num_lines} lines, must have at most 150"
    for page in pages(source):
        for number, line in enumerate(CODE.sub(lambda code: "\n" * code.group().count("\n"), page.read_text()).splitlines(), 1):
            cells = re.sub(r"\]\([^)]*\)", "]", line).split(" | ") if line.startswith("|") else []
            for cell in cells:
                if len(cell) > MOST_IN_A_CELL and not ONLY_CODE.fullmatch(cell.strip(" |")):
                    yield f"{page.relative_to(source)}:{number}: a table cell has {len(cell)} characters, at most {MOST_IN_A_CELL}"


def texts_of(source):
    """For each source file, its string literals in a row: a message that is joined from parts is contiguous."""
    files = [source / "tests/CMakeLists.txt", *(file for top in QUOTED for file in sorted((source / top).rglob("*")))]
    for file in files:
        if file.suffix in (*SOURCES, ".py", ".sh", ".txt", ".cmake"):
            literals = "".join(double or single for double, single in STRING.findall(file.read_text()))
            yield re.sub(r"\{[^{}]*\}", "\0", literals)


def foreign_quotes(source):
    page = (source / "docs/troubleshooting.md").read_text()
    quotes = [quote for quote, of in re.findall(r"^\*\*`([^`]+)`\*\*( \(of \w+.*)?$", page, re.MULTILINE) if not of]
    if len(quotes) < 40:
        yield f"docs/troubleshooting.md quotes {len(quotes)} messages, must be at least 40"
    texts = list(texts_of(source))
    for quote in quotes:
        parts = [part.strip(" '") for part in quote.split("…")]
        parts = [part for part in parts if len(part) > 6]
        if not parts or not any(all(part in text for part in parts) for text in texts):
            yield f"docs/troubleshooting.md: no source file says: {quote}"


def main():
    source = pathlib.Path(sys.argv[1]).resolve()
    checks = (
        *(dead_ends, undocumented_variables, path_of_a_token, wrong_layers, stale_versions),
        *(stale_benchmarks, stale_pictures, long_lines, foreign_quotes),
    )
    failures = [failure for check in checks for failure in check(source)]
    print("\n".join(failures) or "documentation: ok")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
