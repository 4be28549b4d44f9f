"""Ends waits for other ranks on Ctrl-C.

The library asks at least every 100 ms whether a wait should end. The callback must not run Python code: that would run
the signal handler, whose exception cannot leave a callback. So it is composed of C functions. PyOS_InterruptOccurred
detects SIGINT on the main thread; once the call has failed, the signal is returned to Python.
"""
import _thread
import ctypes
import itertools
import operator
from typing import Dict

_occurred = ctypes.pythonapi.PyOS_InterruptOccurred
_occurred.restype = ctypes.c_int
_occurred.argtypes = []

_taken: Dict[int, int] = {0: 0}  # has the key 1 while Python misses a signal that the callback has taken

_ended: Dict[int, int] = {}  # threads whose wait a callback ends
caught: Dict[int, BaseException] = {}  #: what a signal handler has raised in a callback during a wait of this thread

# Every call is _taken.setdefault(_occurred(), 1) | _ended.pop(_thread.get_ident(), 0), of which the first is _occurred().
_signals = map(_taken.setdefault, iter(_occurred, None), itertools.repeat(1))
_ends = map(_ended.pop, iter(_thread.get_ident, None), itertools.repeat(0))
_answer = map(operator.or_, _signals, _ends).__next__
_callback = ctypes.CFUNCTYPE(ctypes.c_int)(_answer)  # ignores the library's argument, the context
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_callback))  # a thread may use it until the process ends

#: For crossdock_bootstrap_config.interrupt.
INTERRUPT = ctypes.cast(_callback, ctypes.c_void_p)


def end_wait(exception: BaseException) -> None:
    """Ends the wait of this thread, whose call then raises the exception. For callbacks, which cannot raise it."""
    caught[_thread.get_ident()] = exception
    _ended[_thread.get_ident()] = 1


def raise_caught() -> None:
    """After a call: raises what a signal handler has raised in a callback."""
    _ended.pop(_thread.get_ident(), None)
    exception = caught.pop(_thread.get_ident(), None)
    if exception is not None:
        raise exception


def give_back_signal() -> None:
    """After a failed call: if it has been interrupted, Python's handler of SIGINT runs next. It raises KeyboardInterrupt,
    unless the program has set another one."""
    has_taken = _taken.pop(1, None)
    if caught:
        raise_caught()
    if has_taken:
        _thread.interrupt_main()
