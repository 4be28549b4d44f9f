"""Failures of the library as exceptions."""
import ctypes
import enum
import re
from typing import NoReturn, Optional

from ._interrupt import caught, give_back_signal, raise_caught
from ._abi import ErrorInfo
from ._library import lib


class ErrorCode(enum.IntEnum):
    """Why a call failed."""

    INVALID_ARGUMENT = 1  #: the same error on every rank; the group stays usable
    MISMATCH = 2  #: ranks differ in configuration or call; the group stays usable
    UNSUPPORTED = 3  #: not built in, or not possible on this machine
    CAPACITY = 4  #: more rows than max_rows; the text gives the size needed
    PEER_FAILED = 5  #: a rank left, failed or died; the group is poisoned: later calls fail too
    TIMEOUT = 6  #: a rank missed a deadline; the group is poisoned
    COMMUNICATION = 7  #: the communicator failed; the group is poisoned
    CUDA_FAILURE = 8  #: a CUDA call failed
    INTERNAL = 9  #: a bug in Crossdock
    OUT_OF_MEMORY = 10  #: a rank has not enough memory

    @property
    def text(self) -> str:
        """The library's text for it: "invalid argument", ..."""
        return self.name.lower().replace("_", " ")


class Error(RuntimeError):
    """A failed call. Its text is the library's, the same on every rank."""

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


_NO_HANDLE = re.compile("(bootstrap|group|dispatcher|plan|layer) must not be NULL")  # only closed objects have no handle


def last_error() -> Error:
    """The calling thread's last failure."""
    info = ErrorInfo()
    lib.last_error_info(ctypes.byref(info))
    return Error(
        _NO_HANDLE.sub(r"the \1 has been closed", lib.last_error().decode(errors="replace")),
        ErrorCode(info.status),
        None if info.culprit < 0 else info.culprit,
        info.operation.decode(),
        info.sequence,
    )


def fail(rank: Optional[int] = None, cause: Optional[BaseException] = None) -> NoReturn:
    """Raises the calling thread's last failure, in a call by `rank`. `cause` is the reason why Python refused an
    argument."""
    error = last_error()
    give_back_signal()
    raise error from cause


def check(status: int, rank: Optional[int] = None) -> None:
    if status:
        fail(rank)
    if caught:
        raise_caught()


# Texts of exceptions, as the other ranks see them.


def exception_text(error: Optional[BaseException]) -> bytes:
    """Type and text, even if the error cannot tell its text."""
    kind = type(error).__name__
    try:
        text = f"{kind}: {error}"
    except Exception:
        text = f"{kind} without a text"
    return text.encode(errors="replace")


def refusal_text(error: Optional[Exception]) -> bytes:
    """As exception_text, without the type of a TypeError or ValueError, which explain themselves."""
    text = exception_text(error)
    prefix = type(error).__name__.encode(errors="replace") + b": "
    return text[len(prefix) :] if isinstance(error, (TypeError, ValueError)) and text.startswith(prefix) else text
