#!/usr/bin/env python3
"""Wraps the paragraphs of README.md, CONTRIBUTING.md, CHANGELOG.md and docs/*.md in which a line is too long.

    tools/wrap_docs.py            # wraps them
    tools/wrap_docs.py --check    # only lists the lines; exit status 1 if there are any

Tables, headings and code stay as they are.
"""
import pathlib
import re
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[1]
MOST = 129  # characters in a line of prose
ITEM = re.compile(r"(\s*(?:[-*]|\d+\.) |> |)")
STARTS = re.compile(r"\s*(?:[-*+|#=]|\d+[.)] )")
SOLID = re.compile(r"`[^`]*`|\]\([^)]*\)")  # code and targets of links are not broken


def pages():
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def is_prose(line, in_fence):
    return not in_fence and not re.match(r"    |\t|```|\||#|<!--|!\[|$", line)


def paragraphs(lines):
    """(first line, lines, whether it is prose) of every stretch of lines that may be wrapped together."""
    found, in_fence = [], False
    for number, line in enumerate(lines, 1):
        prose = is_prose(line, in_fence)
        in_fence ^= line.startswith("```")
        starts = bool(re.match(r"\s*(?:[-*]|\d+\.) ", line))
        if prose and not starts and found and found[-1][2]:
            found[-1][1].append(line)
        else:
            found.append((number, [line], prose))
    return found


def wrapped(lines):
    mark = ITEM.match(lines[0]).group(1)
    quote = mark == "> "
    text = " ".join(line.removeprefix("> ").strip() if quote else line.strip() for line in lines)
    text = text[len(mark.strip()):].strip() if mark and not quote else text
    text = SOLID.sub(lambda code: code.group(0).replace(" ", "\0"), text)
    rest = "> " if quote else " " * len(mark)
    for width in range(MOST, 0, -1):
        broken = textwrap.wrap(
            text, width, initial_indent=mark, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
        )
        if not any(STARTS.match(line) for line in broken[1:]):  # a word that would begin an item, a heading or a table
            return [line.replace("\0", " ") for line in broken]
    return lines


def main():
    status, check = 0, sys.argv[1:] == ["--check"]
    for page in pages():
        result = []
        for number, lines, prose in paragraphs(page.read_text().split("\n")):
            long = [number + i for i, line in enumerate(lines) if prose and len(line) > MOST]
            if long and check:
                status = 1
                for line in long:
                    print(f"{page.relative_to(ROOT)}:{line}: longer than {MOST} characters; run tools/wrap_docs.py")
            result += wrapped(lines) if long else lines
        if not check:
            page.write_text("\n".join(result))
    return status


if __name__ == "__main__":
    sys.exit(main())
