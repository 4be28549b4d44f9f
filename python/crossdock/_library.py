"""Finds and loads libcrossdock.so."""
import ctypes
import os
import pathlib
import re
import types
from typing import Any, Iterator, Tuple

from . import _abi

_PACKAGE = pathlib.Path(__file__).resolve().parent


def _read_version() -> str:
    """The version in the header, which is beside an installed library; else the package is in the source tree."""
    installed = _PACKAGE / "lib" / "version.h"
    header = installed if installed.is_file() else _PACKAGE.parents[1] / "include" / "crossdock" / "version.h"
    found = re.search(r'CROSSDOCK_VERSION "(.*)"', header.read_text())
    assert found, header
    return found.group(1)


#: Version of this package. The library must have the same.
__version__ = _read_version()

_SONAME = "libcrossdock.so." + ".".join(__version__.split(".")[:2])


def _build_trees() -> Iterator[pathlib.Path]:
    """Shared libraries in the folders of build/, next to python/: those for Python (`make python`) first, newest first."""
    found = (_PACKAGE.parents[1] / "build").glob("*/" + _SONAME)

    def order(path: pathlib.Path) -> Tuple[bool, float]:
        return path.parent.name.startswith("python"), path.stat().st_mtime

    return iter(sorted(found, key=order, reverse=True))


def find_library() -> str:
    """The library that this package uses: CROSSDOCK_LIBRARY, else the wheel's, a build tree's or the system's."""
    given = os.environ.get("CROSSDOCK_LIBRARY")
    if given:
        return given
    installed = _PACKAGE / "lib" / _SONAME
    if installed.is_file():
        return str(installed)
    for built in _build_trees():
        return str(built)
    return _SONAME


def _load() -> Any:
    path = find_library()
    try:
        library = ctypes.CDLL(path)
        functions = _abi.declare(library)
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"crossdock: cannot use the library {path}: {error}. Install the package with `pip install .`, or build it in "
            "the source tree with `make python`, or set CROSSDOCK_LIBRARY to the path of libcrossdock.so"
        ) from error
    version = functions["version"]().decode()
    if version != __version__:
        raise ImportError(f"crossdock: the package has version {__version__}, the library {path} has {version}")
    return types.SimpleNamespace(**functions, path=path)


#: The functions of the C API.
lib = _load()
