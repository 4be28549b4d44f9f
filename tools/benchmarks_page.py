"""What the tools that measure have in common: their arguments, and the page their tables go to."""
import argparse
import pathlib
import subprocess
import sys

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"


def main(doc, *, scenarios, command, repeat, marker, report):
    """Prints `report(arguments)`, or with --write puts it between the page's markers <!-- marker --> and its end."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="default: " + " ".join(scenarios))
    parser.add_argument("--repeat", type=int, default=repeat, help=f"timed repetitions ({repeat})")
    parser.add_argument("--command", default=command, help=f"the command that is measured ({command})")
    parser.add_argument("--write", action="store_true", help=f"write into {PAGE.name} in place of printing")
    arguments = parser.parse_args()
    arguments.scenarios = arguments.scenarios or scenarios
    try:
        text = report(arguments)
    except (OSError, subprocess.CalledProcessError) as error:  # the command is missing, or has said why it failed
        sys.exit(f"{parser.prog}: {error}")
    if not arguments.write:
        print(text)
        return
    begin, end = f"<!-- {marker} -->\n", f"<!-- end of {marker} -->\n"
    before, rest = PAGE.read_text().split(begin)
    PAGE.write_text(before + begin + "\n" + text + rest[rest.index(end):])
