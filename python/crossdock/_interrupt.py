"""Ends waits for other ranks on Ctrl-C.

The library asks at least every 100 ms whether a wait should end. The callback must not run Python code: that would run
the signal handler, whose exception cannot leave a callback. So it is composed of C functions. PyOS_InterruptOccurred
detects SIGINT on the main thread; once the call has failed, the signal is returned to Python.
"""
import _thread
import ctypes
import itertools
from typing import Dict

_occurred = ctypes.pythonapi.PyOS_InterruptOccurred
_occurred.restype = ctypes.c_int
_occurred.argtypes = []

_taken: Dict[int, int] = {0: 0}  # has the key 1 while Python misses a signal that the callback has taken

# Every call is _taken.setdefault(_occurred(), 1): the value of _occurred().
_answer = map(_taken.setdefault, iter(_occurred, None), itertools.repeat(1)).__next__
_callback = ctypes.CFUNCTYPE(ctypes.c_int)(_answer)  # ignores the library's argument, the context
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_callback))  # a thread may use it until the process ends

#: For crossdock_bootstrap_config.interrupt.
INTERRUPT = ctypes.cast(_callback, ctypes.c_void_p)


def give_back_signal() -> None:
    """After a failed call: if it has been interrupted, Python's handler of SIGINT runs next. It raises KeyboardInterrupt,
    unless the program has set another one."""
    if _taken.pop(1, None):
        _thread.interrupt_main()
