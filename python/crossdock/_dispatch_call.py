"""One dispatch: its arguments, its results, and a call that is pending."""
from ctypes import byref
from typing import Any, Callable, Iterator, NamedTuple, Optional, Tuple

from ._abi import DispatchArgs, DispatchResult, OnChunk, maker
from ._errors import Error, ErrorCode
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
    """A call that has begun. Keeps its arrays alive. Every begun call must be finished before its dispatcher is closed."""

    def __init__(self, handle: Optional[int], finish: Callable[[int], Any]):
        self._handle = handle
        self._finish = finish

    def finish(self) -> Any:
        """The results. On a GPU, the dispatcher's stream waits for the call; the host does not."""
        handle, self._handle = self._handle, None
        if handle is None:
            raise ValueError("the call has been finished already")
        return self._finish(handle)


class PendingDispatch(Pending):
    """A dispatch that has begun."""

    def __init__(
        self,
        handle: Optional[int],
        finish: Callable[[int], Dispatched],
        next_chunk: Callable[[int], Optional[Tuple[Dispatched, int, int]]],
    ):
        super().__init__(handle, finish)
        self._next_chunk = next_chunk

    def chunks(self) -> Iterator[Tuple[Dispatched, int, int]]:
        """Yields (arrived, first_expert, last_expert) for every chunk, in expert order. On a GPU, the dispatcher's stream
        waits for the rows and weights of these local experts; the host does not. Rows of later chunks must not be used
        yet. On the CPU there is one chunk."""
        while self._handle is not None:
            chunk = self._next_chunk(self._handle)
            if chunk is None:
                return
            yield chunk


_X = DispatchArgs.x.offset
_SCALES = DispatchArgs.scales.offset
_ROWS = DispatchResult.rows.offset
_ROW_SCALES = DispatchResult.row_scales.offset
_ROW_WEIGHTS = DispatchResult.row_weights.offset
_new_args = maker(DispatchArgs)
_new_results = maker(DispatchResult)


class DispatchCall:
    """The arguments and results of one dispatch."""

    __slots__ = ("args", "exception", "given", "has_chunks", "kept", "marshal", "plan", "rank", "results")

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
                args.on_chunk = self._callback(on_chunk)

    def call(self, function: Any, dispatcher: Optional[int], *more: Any) -> None:
        """Calls lib.dispatch or begin_dispatch."""
        try:
            self.marshal.call(self.rank, function, dispatcher, self.plan, byref(self.args), byref(self.results), *more)
        except Error:
            self.args = None  # its callback refers to this object
            if self.exception is not None:
                raise self.exception
            raise

    def finish(self, stream: int) -> Dispatched:
        x, rows, row_weights, row_scales, scales, _ = self.given
        with_row_weights = self.args.with_row_weights
        self.args = None  # its callback refers to this object
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

    def _callback(self, on_chunk: Callable[[Dispatched, int, int], None]) -> Any:
        if not callable(on_chunk):
            raise TypeError(f"on_chunk must be a function, got {type(on_chunk).__name__}")

        def callback(_context: Any, results: Any, first_expert: int, last_expert: int) -> int:
            try:
                on_chunk(self.arrived(results.contents), first_expert, last_expert)
                return 0
            except BaseException as exception:
                self.exception = exception
                lib.set_callback_error(f"{type(exception).__name__}: {exception}".encode())
                return ErrorCode.COMMUNICATION

        return OnChunk(callback)
