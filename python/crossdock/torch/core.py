"""The dispatchers of the library behind those of crossdock.torch, known to the operators by numbers."""
import itertools
import weakref
from typing import Any, List, NoReturn, Optional

import crossdock
from crossdock._library import lib
from crossdock._owner import Shared
from crossdock._tensor import Marshal

from . import groups, native


class Core(Shared):
    """A dispatcher of the library with its group."""

    def __init__(self, group: crossdock.Group, config: dict):
        self.group = group
        self.lock = groups.lock_of(group)  # held during calls
        self.config = config
        self.dispatcher = crossdock.Dispatcher(group, **config)
        self.width: int = config["width"]
        self.max_rows: Optional[int] = config.get("max_rows")
        self.local_experts = _local_experts(group, config)
        self.num_local_experts = len(self.local_experts)
        self.captured: List[Any] = []  # plans that replays of CUDA graphs use
        self.key = next(_keys)
        _cores[self.key] = self
        if native.module is not None:
            self._own(native.module.remove_dispatcher, self.key)
            numbers = (self.dispatcher._handle, group.rank, self.lock, self.num_local_experts, self.width)
            native.module.add_dispatcher(self.key, self, *numbers)

    def close(self) -> None:
        with self.lock:
            if native.module is not None:
                native.module.close_dispatcher(self.key)
            self.dispatcher.close()

    def refuse(self, error: Exception, function: Any = lib.plan_create, *plan: Optional[int]) -> NoReturn:
        """For an argument that cannot be used: makes the call that the other ranks make, which fails on all of them."""
        with Marshal() as marshal:
            raise error
        num_missing = len(function.argtypes) - 1 - len(plan)
        with self.lock:
            marshal.call(self.group.rank, function, self.dispatcher._handle, *plan, *(None,) * num_missing)
        raise error


def _local_experts(group: crossdock.Group, config: dict) -> List[int]:
    placement = config.get("placement")
    if placement is not None:
        return [expert for expert, rank in enumerate(placement) if rank == group.rank]
    each, more = divmod(config["num_experts"], group.size)
    first = group.rank * each + min(group.rank, more)
    return list(range(first, first + each + (1 if group.rank < more else 0)))


_keys = itertools.count(1)
_cores: "weakref.WeakValueDictionary[int, Core]" = weakref.WeakValueDictionary()
_shared: "weakref.WeakKeyDictionary[crossdock.Group, Any]" = weakref.WeakKeyDictionary()


def shared_core(group: crossdock.Group, **config: Any) -> Core:
    """The dispatcher that all layers of a model with this configuration share; the layers call it in order."""
    cores = _shared.get(group)
    if cores is None:
        cores = _shared.setdefault(group, weakref.WeakValueDictionary())
    key = repr(sorted(config.items()))
    core = cores.get(key)
    if core is None:
        core = cores[key] = Core(group, {"nonfinite": "propagate", **config})
    return core


def core_of(key: int) -> Core:
    core = _cores.get(key)
    if core is None:
        raise RuntimeError("this crossdock.torch.Dispatcher is closed, or was not kept as long as its calls are used")
    return core
