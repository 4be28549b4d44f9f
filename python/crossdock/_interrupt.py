"""Ends waits for other ranks: on Ctrl-C, and when the interpreter ends.

The library asks at least every 100 ms whether a wait should end. The callback must not run Python code: that would run
the signal handler, whose exception cannot leave a callback. So it is composed of C functions. PyOS_InterruptOccurred
detects SIGINT on the main thread; once the call has failed, the signal is returned to Python.
"""
import _thread
import atexit
import ctypes
import operator
import re
import sys
import threading
import time
import weakref
from typing import Any, List

_occurred = ctypes.pythonapi.PyOS_InterruptOccurred
_occurred.restype = ctypes.c_int
_occurred.argtypes = []

_ending: List[bool] = []  # not empty: the interpreter is exiting

# Every call is _occurred() | len(_ending).
_answer = map(operator.or_, iter(_occurred, None), iter(_ending.__len__, None)).__next__
_callback = ctypes.CFUNCTYPE(ctypes.c_int)(_answer)  # ignores the library's argument, the context
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_callback))  # a thread may use it until the process ends

#: For crossdock_bootstrap_config.interrupt.
INTERRUPT = ctypes.cast(_callback, ctypes.c_void_p)


def give_back_signal(text: str, is_culprit: bool) -> None:
    """After a failed call: if it was interrupted here, Python's handler of SIGINT runs next. It raises KeyboardInterrupt,
    unless the program has set another one."""
    if threading.current_thread() is not threading.main_thread():
        return
    in_set_up = re.match(r"rank \d+ of \d+: interrupted ", text)  # other ranks' text says that this rank gave up
    if in_set_up or (is_culprit and "interrupted in " in text):
        _thread.interrupt_main()


# Waits of daemon threads must end before the interpreter is gone: Python then ends any thread that requests the GIL, and
# the library's code does not survive that.


def _is_in_a_call(frame: Any) -> bool:
    package = __name__.rpartition(".")[0]
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(package):
            return True
        frame = frame.f_back
    return False


def _end_waits() -> None:
    _ending.append(True)
    own = threading.get_ident()
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        frames = sys._current_frames()
        if not any(_is_in_a_call(frame) for thread, frame in frames.items() if thread != own):
            return
        time.sleep(0.01)


weakref.finalize(_is_in_a_call, int)  # from here on, finalizers of groups run after _end_waits
atexit.register(_end_waits)
