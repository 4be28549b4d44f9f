"""Plans: one routing, agreed by all ranks."""
import ctypes
from ctypes import byref
from typing import Any, List, Optional

from . import _tensor
from ._abi import PlanInfo, maker
from ._dtype import DType
from ._errors import check
from ._library import lib
from ._owner import Owner

_new_info = maker(PlanInfo)


class Plan(Owner):
    """One routing, agreed by all ranks: the final row of every route. Made by Dispatcher.plan; read-only.

    Arrays of a plan are views of its memory, on its device, and keep it alive.
    """

    __slots__ = ("_dispatcher", "_handle", "_info", "__weakref__")

    def __init__(self, handle: Optional[int], dispatcher: Any):
        """For Dispatcher.plan."""
        self._own(lib.plan_destroy, handle)
        self._handle = handle
        self._dispatcher = dispatcher
        self._info: Optional[PlanInfo] = None

    def close(self) -> None:
        """Frees the plan and the memory of its arrays. Does nothing the second time."""
        handle, self._handle, self._info = self._handle, None, None
        if handle is not None:
            self._disown()
            lib.plan_destroy(handle)

    @property
    def id(self) -> int:
        return self._describe().id

    @property
    def num_tokens(self) -> int:
        """T."""
        return self._describe().num_tokens

    @property
    def capacity_rows(self) -> int:
        """R of every tensor of rows: exact, or max_rows on a GPU."""
        return self._describe().capacity_rows

    @property
    def num_local_experts(self) -> int:
        """E_local."""
        return self._describe().num_local_experts

    @property
    def top_k(self) -> int:
        """K of the plan's weights: the dispatcher's, or more with a dense map."""
        return self._describe().weights.shape[1]

    @property
    def device(self) -> Optional[int]:
        """Index of the GPU, or None for the host."""
        info = self._describe()
        return info.device_index if info.device_kind else None

    @property
    def segment_starts(self) -> Any:
        """[E_local + 1] int64. Local expert e has rows [starts[e], starts[e] + counts[e]); the rows from there to
        starts[e + 1] are pad rows: zero, weight 0. The last entry is the number of rows in use."""
        info = self._describe()
        return _tensor.view_1d(info.segment_starts, DType.I64, info.num_local_experts + 1, self.device, self)

    @property
    def segment_counts(self) -> Any:
        """[E_local] int64."""
        info = self._describe()
        return _tensor.view_1d(info.segment_counts, DType.I64, info.num_local_experts, self.device, self)

    @property
    def segment_starts_ptr(self) -> int:
        """Address of segment_starts."""
        return self._describe().segment_starts or 0

    @property
    def segment_counts_ptr(self) -> int:
        """Address of segment_counts."""
        return self._describe().segment_counts or 0

    @property
    def weights(self) -> Any:
        """[T, K] fp32 (fp64 if they were fp64 on the CPU): weights of kept routes, 0 elsewhere."""
        return _tensor.view(_tensor.fields_at(self._describe(), PlanInfo.weights.offset), self)

    @property
    def weights_dtype(self) -> DType:
        return DType(self._describe().weights.dtype)

    def num_rows(self) -> int:
        """Rows in use on this rank, pad rows included. May wait for the GPU."""
        rows = ctypes.c_int64()
        check(lib.plan_num_rows(self._handle, byref(rows)))
        return rows.value

    def tokens_per_expert(self) -> List[int]:
        """segment_counts as a list. For plans in host memory."""
        info = self._describe()
        if info.device_kind:
            raise TypeError("the plan is on a GPU: copy segment_counts, which is there")
        size = info.num_local_experts
        return (ctypes.c_int64 * size).from_address(info.segment_counts)[:] if size else []

    def dropped(self) -> List[int]:
        """[E] number of this rank's routes to each expert that capacity dropped. May wait for the GPU."""
        counts = (ctypes.c_int64 * max(self._dispatcher.num_experts, 1))()
        check(lib.plan_dropped(self._handle, counts))
        return counts[: self._dispatcher.num_experts]

    def __repr__(self) -> str:
        return f"<crossdock.Plan: {self.num_tokens} tokens, {self.capacity_rows} rows, {self.num_local_experts} experts>"

    def _describe(self) -> PlanInfo:
        if self._info is None:
            info = _new_info()
            check(lib.plan_describe(self._handle, byref(info)))
            self._info = info
        return self._info
