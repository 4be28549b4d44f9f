"""Notices of long waits for other ranks."""
import _thread
import ctypes
import sys
from typing import Any, Callable, List, NamedTuple, Tuple, Union

from . import _abi


class WaitNotice(NamedTuple):
    """A wait for other ranks that takes long."""

    text: str  #: all of it in words, one line
    rank: int  #: the rank that waits
    size: int
    awaited: Tuple[int, ...]  #: the ranks it waits for; empty: not known
    operation: str  #: "dispatch", ...; "set-up" while a group is made
    sequence: int  #: number of the collective in its group; 0 in set-up
    waited: float  #: seconds
    left: float  #: seconds until the wait fails, unless there is progress


OnWait = Union[Callable[[WaitNotice], Any], None, bool]


def _print(notice: WaitNotice) -> None:
    """Of the ranks that wait for the same rank, the lowest speaks for all; if rank 0 is missing, each for itself."""
    lower = set(range(notice.rank))
    if not notice.awaited or notice.awaited[0] == 0 and notice.operation == "set-up" or lower <= set(notice.awaited):
        print("crossdock: " + notice.text, file=sys.stderr, flush=True)


_listeners: List[Callable[[WaitNotice], Any]] = [_print]  # kept: a group may call them until the process ends


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(_abi.WaitNotice))
def _callback(number: Any, given: Any) -> None:
    try:
        notice = given.contents
        _listeners[number or 0](
            WaitNotice(
                notice.text.decode(),
                notice.rank,
                notice.size,
                tuple(notice.awaited[: notice.num_awaited]),
                notice.operation.decode(),
                notice.sequence,
                notice.waited_s,
                notice.left_s,
            )
        )
    except KeyboardInterrupt:
        _thread.interrupt_main()  # ends the wait
    except BaseException:
        pass  # the wait goes on


ctypes.pythonapi.Py_IncRef(ctypes.py_object(_callback))  # a thread may use it until the process ends


def _has_terminal() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # closed
        return False


def on_wait_fields(on_wait: OnWait) -> Any:
    """The fields on_wait and on_wait_context of a config. None: prints if a terminal shows standard error; False: nothing."""
    if on_wait is None:
        on_wait = _print if _has_terminal() else False
    if not on_wait:
        return {}
    if not callable(on_wait):
        raise TypeError(f"on_wait must be a function, None or False, got {type(on_wait).__name__}")
    if on_wait not in _listeners:
        _listeners.append(on_wait)
    return {"on_wait": ctypes.cast(_callback, ctypes.c_void_p), "on_wait_context": _listeners.index(on_wait)}
