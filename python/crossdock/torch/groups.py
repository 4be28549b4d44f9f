"""Crossdock groups for PyTorch's process groups."""
import threading
import weakref
from typing import Any, Dict, List, Optional

import torch.distributed as dist

import crossdock
from crossdock._group import group_config as check_options

# Destroying a process group removes its entry; dispatchers keep their group as long as they live.
_groups: "weakref.WeakKeyDictionary[Any, crossdock.Group]" = weakref.WeakKeyDictionary()
_locks: "weakref.WeakKeyDictionary[crossdock.Group, Any]" = weakref.WeakKeyDictionary()
_alone: List[crossdock.Group] = []  # the group of one rank, for programs without torch.distributed


def group(process_group: Optional[dist.ProcessGroup] = None, **options: Any) -> crossdock.Group:
    """The Crossdock group with the ranks of `process_group` (default: all ranks), made when first requested.

    The first call for a process group is collective over its ranks: they exchange about 100 bytes each with
    `all_gather_object`. Afterwards Crossdock does not use the process group. `options` are those of
    `crossdock.Group.from_all_gather`, for example `arrival_deadline`; they apply to the first call.
    """
    if process_group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return group_of_one(**options)
        process_group = dist.group.WORLD
    found = _groups.get(process_group)
    if found is None or found.closed:
        found = _connect(process_group, options)
        _groups[process_group] = found
    return found


def group_of(ranks: Any) -> crossdock.Group:
    """The group of a process group or one-dimensional mesh; a `crossdock.Group` is returned unchanged. None: all ranks."""
    if isinstance(ranks, crossdock.Group):
        return ranks
    return group(ranks.get_group() if hasattr(ranks, "get_group") else ranks)


def process_group_of(ranks: crossdock.Group) -> Optional[dist.ProcessGroup]:
    """The process group for which the group was made; None if it is gone or there never was one."""
    return next((process_group for process_group, found in list(_groups.items()) if found is ranks), None)


def close(process_group: Optional[dist.ProcessGroup] = None) -> None:
    """Leaves the Crossdock group of `process_group`. Never waits. Its dispatchers can no longer be used.

    Not required: a group ends with its process group, and at exit."""
    if process_group is None:
        while _alone:
            _alone.pop().close()
        if not (dist.is_available() and dist.is_initialized()):
            return
        process_group = dist.group.WORLD
    found = _groups.pop(process_group, None)
    if found is not None:
        found.close()


def lock_of(ranks: crossdock.Group) -> Any:
    """Lock held during calls: forward and backward may run on different threads, and a group serves one at a time."""
    lock = _locks.get(ranks)
    if lock is None:
        lock = _locks.setdefault(ranks, threading.RLock())
    return lock


def group_of_one(**options: Any) -> crossdock.Group:
    """A group of this rank alone."""
    if not _alone or _alone[-1].closed:
        _alone[:] = [crossdock.Group.from_all_gather(lambda blob: [blob], 0, **options)]
    return _alone[-1]


def _connect(process_group: dist.ProcessGroup, options: Dict[str, Any]) -> crossdock.Group:
    options = dict(options)
    address, ranks_per_node = options.pop("address", None), options.pop("ranks_per_node", None)
    # A rank that cannot use its options, or whose bootstrap failed, sends the reason instead of a blob, so no rank waits
    # for it.
    bootstrap, failure, mine = None, None, None
    try:
        check_options(**options)
        of_setup = {name: options.get(name) for name in ("setup_deadline", "on_wait", "setup_notice_after")}
        bootstrap = crossdock.Bootstrap(address, ranks_per_node=ranks_per_node, **of_setup)
        mine = bootstrap.blob
    except Exception as error:
        failure, mine = error, str(error)
    received: List[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(received, mine, group=process_group)
    if failure is not None:
        raise failure
    for rank, blob in enumerate(received):
        if not isinstance(blob, bytes):
            bootstrap.close()
            raise crossdock.Error(f"rank {rank} cannot make a group: {blob}", culprit=rank, operation="join")
    return bootstrap.join(received, dist.get_rank(process_group), **options)
