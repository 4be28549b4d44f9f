"""The dispatchers that all experts modules of a process share."""
from typing import Any, Dict, NamedTuple, Optional, Tuple, Union

import crossdock
from crossdock.torch import Dispatcher


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
