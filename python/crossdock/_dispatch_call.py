"""One dispatch: its arguments, its results, and a call that is pending."""
import ctypes
from ctypes import byref
from typing import Any, Callable, Generator, Iterator, NamedTuple, Optional, Tuple

from ._abi import Chunk, ChunkCallback, DispatchArgs, DispatchResult, maker
from ._errors import Error, exception_text
from ._library import lib
from ._owner import Owner
from ._plan import Plan
from ._tensor import Array, ArrayLike, Marshal, fields_at, handle_in, is_numpy, result


class Dispatched(NamedTuple):
    """Results of a dispatch. R is plan.capacity_rows."""

    rows: Any  #: [R, D], grouped by local expert; pad rows are zero
    row_weights: Any = None  #: [R] if requested; 0 in pad rows
    row_scales: Any = None  #: [R, ...] with fp8 only


class Pending(Owner):
    """A call that has begun. Keeps its arrays alive. If it is dropped or closed, the call ends without results."""

    def __init__(self, handle: ctypes.c_void_p, finish: Callable[[], Any]):
        """The begun call sets `handle`; the end of the call clears it."""
        self._own(lib.pending_destroy, handle)
        self._handle = handle
        self._finish: Any = finish

    def finish(self) -> Any:
        """The results. On a GPU, the dispatcher's stream waits for the call; the host does not."""
        if not self._handle:
            raise ValueError("the call has been finished already")
        try:
            return self._finish()
        finally:
            if not self._handle:
                self._finish = None  # it keeps the arrays

    def close(self) -> None:
        """Ends the call without results, as dropping it does. Does nothing after finish."""
        pending = self._handle.value
        self._handle.value = None  # no signal handler runs before the call
        lib.pending_destroy(pending)
        self._finish = None

    def __enter__(self) -> "Pending":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


class PendingDispatch(Pending):
    """A dispatch that has begun."""

    def __init__(
        self,
        handle: ctypes.c_void_p,
        finish: Callable[[], Dispatched],
        next_chunk: Callable[[], Optional[Tuple[Dispatched, int, int]]],
    ):
        super().__init__(handle, finish)
        self._next_chunk = next_chunk

    def chunks(self) -> Iterator[Tuple[Dispatched, int, int]]:
        """Yields (arrived, first_expert, last_expert) for every chunk, in expert order. On a GPU, the dispatcher's stream
        waits for the rows and weights of these local experts; the host does not. Rows of later chunks must not be used
        yet. On the CPU there is one chunk."""
        while self._handle:
            chunk = self._next_chunk()
            if chunk is None:
                return
            yield chunk


_X = DispatchArgs.x.offset
_SCALES = DispatchArgs.scales.offset
_ROWS = DispatchResult.rows.offset
_ROW_SCALES = DispatchResult.row_scales.offset
_ROW_WEIGHTS = DispatchResult.row_weights.offset
_PASS_CHUNK = ctypes.cast(lib.pass_chunk, ctypes.c_void_p).value
_new_args = maker(DispatchArgs)
_new_results = maker(DispatchResult)


class DispatchCall:
    """The arguments and results of one dispatch."""

    __slots__ = ("args", "callback", "chunk", "exception", "given", "has_chunks", "kept", "marshal", "plan", "rank", "results")

    def __init__(
        self,
        dispatcher: Any,
        plan: Plan,
        x: ArrayLike,
        scales: Optional[ArrayLike],
        row_weights: Any,
        rows: Optional[ArrayLike],
        row_scales: Optional[ArrayLike],
        num_chunks: int,
        on_chunk: Optional[Callable[[Dispatched, int, int], None]],
    ):
        self.marshal = marshal = Marshal(dispatcher._stream)
        self.rank = dispatcher._rank
        args = _new_args()
        self.args: Any = args
        self.results = results = _new_results()
        self.given = (x, rows, None if isinstance(row_weights, bool) else row_weights, row_scales, scales, plan)
        self.callback: Any = None
        self.exception: Optional[BaseException] = None
        self.has_chunks = False
        self.kept: Optional[Dispatched] = None
        self.plan: Optional[int] = None
        with marshal:
            self.plan = handle_in("plan", plan, Plan)
            marshal.put(args, _X, x)
            if scales is not None:
                marshal.put(args, _SCALES, scales)
            if row_weights is not False:
                args.with_row_weights = 1
                marshal.put_output(results, _ROW_WEIGHTS, self.given[2])
            if rows is not None:
                marshal.put_output(results, _ROWS, rows)
            if row_scales is not None:
                marshal.put_output(results, _ROW_SCALES, row_scales)
            if num_chunks != 1:
                args.num_chunks = num_chunks
            if on_chunk is not None:
                self._set_callback(args, on_chunk)

    def call(self, function: Any, dispatcher: Optional[int], *more: Any) -> None:
        """Calls lib.dispatch or begin_dispatch."""
        try:
            self.marshal.call(self.rank, function, dispatcher, self.plan, byref(self.args), byref(self.results), *more)
        except Error:
            if self.exception is None:
                raise
        finally:
            if self.callback is not None:
                self.callback.close()
                self.callback = self.chunk = None  # they refer to this object
        exception, self.exception = self.exception, None
        if exception is not None:
            raise exception

    def finish(self, stream: int) -> Dispatched:
        x, rows, row_weights, row_scales, scales, _ = self.given
        with_row_weights = self.args.with_row_weights
        dispatched = Dispatched(
            result(self.results, _ROWS, rows, x, stream),
            result(self.results, _ROW_WEIGHTS, row_weights, x, stream) if with_row_weights else None,
            result(self.results, _ROW_SCALES, row_scales, x, stream) if scales is not None else None,
        )
        if self.has_chunks:  # arrays of chunks share this memory and keep this object
            self.kept = dispatched
        return dispatched

    def arrived(self, results: DispatchResult) -> Dispatched:
        """Rows that the library owns, as arrays."""
        self.has_chunks = True

        def array_at(offset: int) -> Any:
            fields = fields_at(results, offset)
            if fields[5] == 0:
                return None
            array = Array(fields, None, self)
            return array.numpy() if is_numpy(self.given[0]) else array

        return Dispatched(*(array_at(offset) for offset in (_ROWS, _ROW_WEIGHTS, _ROW_SCALES)))

    def _set_callback(self, args: Any, on_chunk: Callable[[Dispatched, int, int], None]) -> None:
        if not callable(on_chunk):
            raise TypeError(f"on_chunk must be a function, got {type(on_chunk).__name__}")
        self.callback = self._chunks(on_chunk)
        next(self.callback)
        self.chunk = Chunk(ChunkCallback(self.callback.send))
        args.on_chunk = _PASS_CHUNK
        args.on_chunk_context = ctypes.addressof(self.chunk)

    def _chunks(self, on_chunk: Callable[[Dispatched, int, int], None]) -> Generator[None, Any, None]:
        """Receives the chunks. Not a function: a signal handler may run, and raise, before a function's first line, where
        no `try` is in effect yet. A generator is resumed inside its `try`. A chunk fails unless its status is set to 0, after
        which no handler can run until `yield` has returned to the library."""
        chunk = None
        try:
            chunk = yield
            while True:
                arrived = chunk.contents
                on_chunk(self.arrived(arrived.result.contents), arrived.first_expert, arrived.last_expert)
                arrived.status, chunk = 0, None
                chunk = yield
        except GeneratorExit as exception:
            if chunk is None:  # closed: there are no more chunks
                return
            self.exception = exception
        except BaseException as exception:
            self.exception = exception
        try:
            lib.set_callback_error(exception_text(self.exception))
        except BaseException as exception:  # a signal
            self.exception = exception
        yield
