"""Failures of the library as exceptions."""
import _thread
import ctypes
import enum
import threading
from typing import NoReturn, Optional

from ._abi import ErrorInfo
from ._library import lib


class ErrorCode(enum.IntEnum):
    """Why a call failed."""

    INVALID_ARGUMENT = 1  #: the same error on every rank; the group stays usable
    MISMATCH = 2  #: ranks differ in configuration or call; likewise
    UNSUPPORTED = 3  #: not built in, or not possible on this machine
    CAPACITY = 4  #: more rows than max_rows; the text gives the size needed
    PEER_FAILED = 5  #: a rank left, failed or died; the group is poisoned: later calls fail too
    TIMEOUT = 6  #: a rank missed a deadline; the group is poisoned
    COMMUNICATION = 7  #: the communicator failed; the group is poisoned
    CUDA_FAILURE = 8  #: a CUDA call failed
    INTERNAL = 9  #: a bug in Crossdock
    OUT_OF_MEMORY = 10

    @property
    def text(self) -> str:
        """As the library writes it: "invalid argument", ..."""
        return self.name.lower().replace("_", " ")


class Error(RuntimeError):
    """A failed call. Its text is that of the library, the same on every rank."""

    code: ErrorCode
    culprit: Optional[int]  #: rank that caused it, in the group of the call
    operation: str  #: "plan", "dispatch", ...; "" if not applicable
    sequence: int  #: number of the collective in its group; 0 if not applicable

    def __init__(
        self,
        text: str,
        code: ErrorCode = ErrorCode.INTERNAL,
        culprit: Optional[int] = None,
        operation: str = "",
        sequence: int = 0,
    ):
        super().__init__(text)
        self.code = code
        self.culprit = culprit
        self.operation = operation
        self.sequence = sequence

    def __reduce__(self):  # multiprocessing sends exceptions between processes
        return type(self), (str(self), self.code, self.culprit, self.operation, self.sequence)


def last_error() -> Error:
    """The calling thread's last failure."""
    info = ErrorInfo()
    lib.last_error_info(ctypes.byref(info))
    return Error(
        lib.last_error().decode(errors="replace"),
        ErrorCode(info.status),
        None if info.culprit < 0 else info.culprit,
        info.operation.decode(),
        info.sequence,
    )


def fail(rank: Optional[int] = None, cause: Optional[BaseException] = None) -> NoReturn:
    """Raises the calling thread's last failure, of a call by `rank`. `cause` is what Python refused."""
    error = last_error()
    if _was_interrupted(error, rank):
        _thread.interrupt_main()  # Python's handler of SIGINT runs next: KeyboardInterrupt, or what the program set
    raise error from cause


def check(status: int, rank: Optional[int] = None) -> None:
    if status:
        fail(rank)


# ---- Ctrl-C ----
#
# The library asks at least every 100 ms whether a wait is to end. The answer must come from C: Python code would run
# the handler of the signal, whose exception cannot leave a callback. PyOS_InterruptOccurred only takes note of the
# signal (on the main thread), and `fail` gives it back to Python once the call has returned.

_check = ctypes.pythonapi.PyOS_InterruptOccurred
_check.restype = ctypes.c_int
_check.argtypes = []
_callback = ctypes.CFUNCTYPE(ctypes.c_int)(_check)  # the library's argument, the context, is ignored
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_callback))  # threads may wait while the interpreter ends

#: For crossdock_bootstrap_config.interrupt.
INTERRUPT = ctypes.cast(_callback, ctypes.c_void_p)


def _was_interrupted(error: Error, rank: Optional[int]) -> bool:
    if error.code != ErrorCode.COMMUNICATION or threading.current_thread() is not threading.main_thread():
        return False
    text = str(error)
    in_set_up = "interrupted while waiting for" in text  # only the rank itself says so
    return in_set_up or ("interrupted in " in text and rank is not None and error.culprit == rank)
