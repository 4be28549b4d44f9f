"""The command: `crossdock ...` or `python -m crossdock ...` runs the program next to the library."""
import os
import pathlib
import sys

from ._library import find_library


def main() -> None:
    library = pathlib.Path(find_library()).resolve()
    places = (library.parent.parent / "bin" / "crossdock", library.parent / "crossdock")  # installed; a build tree
    for program in places:
        if os.access(program, os.X_OK) and program.is_file():
            os.execv(program, ["crossdock", *sys.argv[1:]])
    sys.exit(f"crossdock: the command is not beside the library {library}: build it with -DCROSSDOCK_BUILD_CLI=ON")


if __name__ == "__main__":
    main()
