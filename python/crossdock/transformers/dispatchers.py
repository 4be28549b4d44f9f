"""The dispatchers that all experts modules of a process share."""
from typing import Any, Dict, NamedTuple, Optional, Tuple, Union

import crossdock
from crossdock.torch import Dispatcher
from crossdock.torch.groups import group_of_one


class Options(NamedTuple):
    """What `register` was told."""

    max_rows: Optional[int] = None
    strategy: str = "auto"
    partial_sums: Union[bool, str] = False
    group_options: Dict[str, Any] = {}


options = Options()

_MADE = "_dispatchers_of_transformers"  # attribute of a group: they refer to it, so no other dictionary would let it go


def dispatcher_of(group: crossdock.Group, **config: Any) -> int:
    """The key, for `crossdock.torch.ops`, of the dispatcher of this group with this configuration. It is kept as long as the
    group: graphs and plans use it."""
    of_group: Dict[Tuple, Dispatcher] = vars(group).setdefault(_MADE, {})
    names = tuple(sorted(config.items()))
    if names not in of_group:
        of_group[names] = Dispatcher(group, **config)
    return of_group[names]._key


def local_dispatcher(num_experts: int, top_k: int, width: int, num_routes: Optional[int]) -> int:
    """dispatcher_of for grouping the rows of this rank's experts.

    num_routes: T * K for tokens on a GPU, where a row limit spares the wait for the number of rows. It is rounded up to one of
    eight sizes per power of two, so that few dispatchers are made.
    """
    max_rows = None
    if num_routes is not None:
        step = 1 << max(num_routes.bit_length() - 4, 0)
        max_rows = max(-(-num_routes // step) * step, 1)
    return dispatcher_of(group_of_one(), num_experts=num_experts, top_k=top_k, width=width, max_rows=max_rows)
