"""The planner: traffic, memory and time of a job before it starts."""
import ctypes
from ctypes import byref
from typing import Any, Dict, Optional, Union

from ._abi_layer import Job, JobSummary, OperationCost, StrategyCost
from ._dispatcher import partial_sums_value
from ._dtype import to_dtype
from ._errors import check
from ._library import lib


def plan(
    model: Optional[str] = None,
    *,
    width: Optional[int] = None,
    inner: Optional[int] = None,
    num_experts: Optional[int] = None,
    top_k: Optional[int] = None,
    tokens: Optional[int] = None,
    sequence: Optional[int] = None,
    micro_batch: int = 1,
    nodes: int = 1,
    ranks_per_node: int = 1,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    ep: Optional[int] = None,
    dtype: Any = "bf16",
    alignment: int = 1,
    capacity_factor: Optional[float] = None,
    partial_sums: Union[bool, str] = False,
    zipf: float = 0.0,
    fabric: Optional[str] = None,
) -> Dict[str, Any]:
    """Plans a job: which strategy to use, what it sends and holds, and how long it takes. Needs no group and no GPU.

    model: sizes of a published model, e.g. "deepseek-v3"; width, inner, num_experts and top_k override its own
    tokens: per rank; or sequence * micro_batch, divided among tp * cp ranks
    ep: ranks that share the experts; None: all ranks of a pipeline stage
    partial_sums: False, "fp32" (or True) or "rows", as for Dispatcher
    zipf: experts are drawn with weights (e + 1)^-zipf; 0: uniformly
    fabric: "h100-nvlink-400g" (None), "h200-nvlink-400g", "gb200", ...

    An impossible job raises Error; its text names the limit, the value and the largest legal value. docs/planner.md explains
    what is computed; docs/python.md lists the keys of the answer.
    """
    job = Job(
        model=_text(model),
        width=width or 0,
        inner=inner or 0,
        num_experts=num_experts or 0,
        top_k=top_k or 0,
        tokens=tokens or 0,
        sequence=sequence or 0,
        micro_batch=micro_batch,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        tp=tp,
        cp=cp,
        pp=pp,
        ep=ep or 0,
        alignment=alignment,
        capacity_factor=capacity_factor or 0,
        zipf=zipf,
        fabric=_text(fabric),
        dtype=to_dtype(dtype),
        partial_sums=partial_sums_value(partial_sums),
    )
    handle = ctypes.c_void_p()
    check(lib.job_plan_create(byref(job), byref(handle)))
    try:
        summary = JobSummary()
        check(lib.job_plan_describe(handle, byref(summary)))
        answer = _to_dict(summary)
        answer["strategies"] = {}
        for index in range(answer.pop("num_strategies")):
            cost = StrategyCost()
            check(lib.job_plan_strategy(handle, index, byref(cost)))
            values = _to_dict(cost)
            answer["strategies"][values.pop("name")] = values
        return answer
    finally:
        lib.job_plan_destroy(handle)


def _text(given: Optional[str]) -> Optional[bytes]:
    return given.encode() if given is not None else None


def _to_dict(struct: ctypes.Structure) -> Dict[str, Any]:
    values: Dict[str, Any] = {}
    for name, *_ in struct._fields_:
        value = getattr(struct, name)
        if name == "struct_size":
            continue
        if isinstance(value, bytes):
            value = value.decode()
        values[name] = _to_dict(value) if isinstance(value, OperationCost) else value
    return values
