"""Lines that say what the ranks choose, and why."""
import ctypes
import os
import sys
from typing import Any, Callable, Dict, List, Optional

from ._interrupt import end_wait

OnLog = Optional[Callable[[str], Any]]

_LEVELS = {"info": 1, "debug": 2}


def _print(line: str) -> None:
    print("crossdock: " + line, file=sys.stderr, flush=True)


_listeners: List[Callable[[str], Any]] = [_print]  # kept: a group may call them until the process ends


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p)
def _callback(number: Any, level: int, line: bytes) -> None:
    try:
        _listeners[number or 0](line.decode(errors="replace"))
    except Exception:
        pass  # a listener must not change what the ranks do
    except BaseException as exception:
        end_wait(exception)


ctypes.pythonapi.Py_IncRef(ctypes.py_object(_callback))  # a thread may use it until the process ends


def log_fields(on_log: OnLog) -> Dict[str, Any]:
    """The fields of a config. The level is CROSSDOCK_LOG; without it, a given function gets info and nothing is printed."""
    name = os.environ.get("CROSSDOCK_LOG", "")
    if name and name not in _LEVELS:
        raise ValueError(f'CROSSDOCK_LOG must be info or debug, got "{name}"')
    if on_log is None:
        if not name:
            return {}
        on_log = _print
    if not callable(on_log):
        raise TypeError(f"on_log must be a function or None, got {type(on_log).__name__}")
    if on_log not in _listeners:
        _listeners.append(on_log)
    return {
        "on_log": ctypes.cast(_callback, ctypes.c_void_p),
        "on_log_context": _listeners.index(on_log),
        "log_level": _LEVELS[name or "info"],
    }
