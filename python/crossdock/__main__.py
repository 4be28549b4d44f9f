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
    sys.exit(f"crossdock: the command is not beside the library {library}. It is built where CLI11 and nlohmann-json are "
             "installed (Debian: libcli11-dev nlohmann-json3-dev): install them, then build again with `pip install .`")


if __name__ == "__main__":
    main()
