"""Notices of long waits for other ranks."""
import ctypes
import sys
import threading
from types import BuiltinMethodType
from typing import Any, Callable, Generator, List, NamedTuple, Tuple, Union

from . import _abi
from ._interrupt import end_wait


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


def _notice_of(given: Any) -> WaitNotice:
    notice = given.contents
    return WaitNotice(
        notice.text.decode(),
        notice.rank,
        notice.size,
        tuple(notice.awaited[: notice.num_awaited]),
        notice.operation.decode(),
        notice.sequence,
        notice.waited_s,
        notice.left_s,
    )


def _receiver(on_wait: Callable[[WaitNotice], Any]) -> Generator[None, Any, None]:
    """Passes notices on. A generator, as DispatchCall._chunks is: signals that have arrived during the wait are handled when
    it is resumed, inside its `try`. The call raises what a handler has raised."""
    while True:
        try:
            notice = _notice_of((yield))
        except BaseException as exception:
            end_wait(exception)
            continue
        try:
            on_wait(notice)
        except Exception:
            pass  # the wait goes on
        except BaseException as exception:
            end_wait(exception)


def _receive_on_threads(on_wait: Callable[[WaitNotice], Any], given: Any) -> None:
    """As _receiver, for several threads at once, none of which handles signals unless it is the main thread."""
    try:
        on_wait(_notice_of(given))
    except Exception:
        pass
    except BaseException as exception:
        end_wait(exception)


_Callback = ctypes.CFUNCTYPE(None, ctypes.py_object, ctypes.POINTER(_abi.WaitNotice))
_callback = _Callback(BuiltinMethodType.__call__)  # the context, a receiver's method `send`, gets the notice: no Python code
_callback_on_threads = _Callback(_receive_on_threads)
for _kept in (_callback, _callback_on_threads):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))  # a thread may use it until the process ends

_contexts: List[Tuple[Any, int, Any]] = []  # on_wait, thread, context: kept, as groups may use them until the process ends


def _context_of(on_wait: Callable[[WaitNotice], Any], thread: int) -> int:
    """Threads have receivers of their own; thread 0: the function is the context."""
    for known, owner, context in _contexts:
        if known == on_wait and owner == thread:
            return id(context)
    context: Any = on_wait
    if thread:
        receiver = _receiver(on_wait)
        next(receiver)
        context = receiver.send
    _contexts.append((on_wait, thread, context))
    return id(context)


def _has_terminal() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # closed
        return False


def on_wait_fields(on_wait: OnWait, on_threads: bool = False) -> Any:
    """The fields on_wait and on_wait_context of a config. None: prints if a terminal shows standard error; False: nothing.
    on_threads: the ranks are threads, which share the config."""
    if on_wait is None:
        on_wait = _print if _has_terminal() else False
    if not on_wait:
        return {}
    if not callable(on_wait):
        raise TypeError(f"on_wait must be a function, None or False, got {type(on_wait).__name__}")
    callback = _callback_on_threads if on_threads else _callback
    thread = 0 if on_threads else threading.get_ident()
    return {"on_wait": ctypes.cast(callback, ctypes.c_void_p), "on_wait_context": _context_of(on_wait, thread)}
