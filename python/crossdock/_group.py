"""Groups: the ranks that exchange rows."""
import atexit
import ctypes
import os
import weakref
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Union

from ._abi import BootstrapConfig, CTensor, GroupConfig, GroupInfo, JoinArgs, check_range, int_array
from ._errors import check
from ._interrupt import INTERRUPT
from ._library import lib
from ._log import OnLog, log_fields
from ._owner import Owner, Shared
from ._tensor import Marshal
from ._wait_notice import OnWait, on_wait_fields


def group_config(
    arrival_deadline: Optional[float] = None,
    progress_deadline: Optional[float] = None,
    setup_deadline: Optional[float] = None,
    recorded_events: Optional[int] = None,
    staging_bytes: Optional[int] = None,
    report_file: Union[str, "os.PathLike[str]", None] = None,
    num_threads: Optional[int] = None,
    ranks_per_node: Optional[int] = None,
    on_wait: OnWait = None,
    notice_after: Optional[float] = None,
    setup_notice_after: Optional[float] = None,
    on_log: OnLog = None,
) -> GroupConfig:
    """Options of all groups; None: the library's default.

    arrival_deadline: seconds for a peer to arrive at a call (600; CROSSDOCK_ARRIVAL_DEADLINE)
    progress_deadline: seconds without progress (30; CROSSDOCK_PROGRESS_DEADLINE)
    setup_deadline: seconds to make the group (as arrival_deadline)
    recorded_events: recent events to keep (256); -1: none
    staging_bytes: limit for rows in transit between nodes (64 MiB); identical on every rank
    report_file: receives the recent events of a failure (CROSSDOCK_REPORT)
    num_threads: threads that move and sum rows (this rank's share of the cores)
    ranks_per_node: for tests: ranks per simulated node
    on_wait: called with a WaitNotice, by the thread that waits, once in a call or set-up that takes long; None: prints its
        text if standard error is a terminal; False: does nothing. Kept until the process ends
    notice_after: seconds without progress until then, in a call (10)
    setup_notice_after: seconds until then, while a group is made (3)
    on_log: called with a line for each choice, such as the strategy, and why; CROSSDOCK_LOG=debug: also those of each rank.
        None: prints them to standard error if CROSSDOCK_LOG is info or debug. Kept until the process ends
    """
    return GroupConfig(
        **on_wait_fields(on_wait),
        **log_fields(on_log),
        notice_after_s=notice_after or 0,
        setup_notice_after_s=setup_notice_after or 0,
        arrival_deadline_s=arrival_deadline or 0,
        progress_deadline_s=progress_deadline or 0,
        setup_deadline_s=setup_deadline or 0,
        recorded_events=recorded_events or 0,
        staging_bytes=staging_bytes or 0,
        report_file=os.fsencode(report_file) if report_file is not None else None,
        num_threads=num_threads or 0,
        ranks_per_node=ranks_per_node or 0,
    )


def _bootstrap_config(
    address: Optional[str] = None,
    setup_deadline: Optional[float] = None,
    ranks_per_node: Optional[int] = None,
    on_wait: OnWait = None,
    setup_notice_after: Optional[float] = None,
) -> BootstrapConfig:
    return BootstrapConfig(
        **on_wait_fields(on_wait),
        notice_after_s=setup_notice_after or 0,
        address=address.encode() if address is not None else None,
        setup_deadline_s=setup_deadline or 0,
        interrupt=INTERRUPT,
        ranks_per_node=ranks_per_node or 0,
    )


def _setup_options(options: Dict[str, Any]) -> Dict[str, Any]:
    """The options of a bootstrap among those of a group."""
    own = {name: options.get(name) for name in ("setup_deadline", "on_wait", "setup_notice_after")}
    return {"ranks_per_node": options.pop("ranks_per_node", None), **own}


class Bootstrap(Owner):
    """A process that has not joined its group yet.

    Each process opens a bootstrap and gives its `blob` to all others by any means (an all-gather of another library,
    files). Then all of them join. The blob contains a secret: send it to members of the group only.
    """

    def __init__(
        self,
        address: Optional[str] = None,
        setup_deadline: Optional[float] = None,
        ranks_per_node: Optional[int] = None,
        on_wait: OnWait = None,
        setup_notice_after: Optional[float] = None,
    ):
        """Listens on `address` (numeric; None: the address of the interface in use). Not collective."""
        config = _bootstrap_config(address, setup_deadline, ranks_per_node, on_wait, setup_notice_after)
        handle = ctypes.c_void_p()
        check(lib.bootstrap_open(ctypes.byref(config), ctypes.byref(handle)))
        self._own(lib.bootstrap_destroy, handle)
        self._handle = handle.value

    @property
    def blob(self) -> bytes:
        """The bytes for the other processes."""
        data = ctypes.c_void_p()
        size = ctypes.c_int64()
        check(lib.bootstrap_blob(self._handle, ctypes.byref(data), ctypes.byref(size)))
        return ctypes.string_at(data, size.value)

    def join(self, blobs: Sequence[bytes], rank: int, **options: Any) -> "Group":
        """Connects the processes; blobs[r] is rank r's. Collective. Closes the bootstrap.

        Options: see Group.
        """
        offsets = (ctypes.c_int64 * (len(blobs) + 1))()
        for index, blob in enumerate(blobs):
            offsets[index + 1] = offsets[index] + len(blob)
        args = JoinArgs(bytes=b"".join(blobs), offsets=offsets, rank=rank, size=len(blobs))
        config = group_config(**options)
        handle = ctypes.c_void_p()
        try:
            check(lib.group_join(self._handle, ctypes.byref(args), ctypes.byref(config), ctypes.byref(handle)), rank)
        finally:
            self.close()
        return Group(handle.value)

    def close(self) -> None:
        """Stops listening. Does nothing the second time."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._disown()
            lib.bootstrap_destroy(handle)


class Group(Shared):
    """One rank's view of the ranks that exchange rows.

    Made by one of the from_ functions or by Bootstrap.join. Their options are arrival_deadline, progress_deadline and
    setup_deadline (seconds), recorded_events, staging_bytes, report_file, num_threads, ranks_per_node, on_wait,
    notice_after and setup_notice_after (seconds), on_log; docs/python.md explains them.

    An object may be used by any thread, but by only one at a time. In a forked child a group does nothing.
    """

    def __init__(self, handle: Optional[int]):
        """For the from_ functions."""
        self._own(lib.group_destroy, handle)
        self._handle = handle
        _open_groups[:] = [other for other in _open_groups if other() is not None] + [weakref.ref(self)]
        info = self._describe()
        self.rank: int = info.rank
        self.size: int = info.size
        self.node: int = info.node  #: of this rank
        self.num_nodes: int = info.num_nodes  #: machines, as far as the communicator knows
        self.communicator: str = info.communicator.decode()  #: "sockets", "threads", ...
        self.note: str = info.note.decode()  #: how the ranks are connected, for logs; "" if nothing is unusual

    @staticmethod
    def from_all_gather(
        all_gather: Callable[[bytes], Sequence[bytes]], rank: int, address: Optional[str] = None, **options: Any
    ) -> "Group":
        """A group of processes that can exchange bytes: all_gather(blob) returns the blobs of all ranks, in order.

        Collective.
        """
        bootstrap = Bootstrap(address, **_setup_options(options))
        try:
            return bootstrap.join(list(all_gather(bootstrap.blob)), rank, **options)
        finally:
            bootstrap.close()

    @staticmethod
    def from_environment(address: Optional[str] = None, **options: Any) -> "Group":
        """A group of processes that meet at MASTER_ADDR and MASTER_PORT, with RANK and WORLD_SIZE (torchrun) or Slurm's
        variables. Collective."""
        bootstrap = _bootstrap_config(address, **_setup_options(options))
        config = group_config(**options)
        handle = ctypes.c_void_p()
        check(lib.group_from_environment(ctypes.byref(bootstrap), ctypes.byref(config), ctypes.byref(handle)))
        return Group(handle.value)

    @staticmethod
    def from_mpi(comm: Any = None, **options: Any) -> "Group":
        """A group over a duplicate of an MPI communicator: mpi4py's, or the address of an MPI_Comm; None:
        MPI_COMM_WORLD. Collective."""
        address = comm
        if comm is not None and not isinstance(comm, int):
            from mpi4py import MPI  # its object holds an MPI_Comm

            address = MPI._addressof(comm)
        config = group_config(**options)
        handle = ctypes.c_void_p()
        check(lib.group_from_mpi(address, ctypes.byref(config), ctypes.byref(handle)))
        return Group(handle.value)

    @staticmethod
    def from_threads(size: int, **options: Any) -> "List[Group]":
        """Groups of `size` ranks that are threads of this process, for tests: the r-th is for rank r's thread."""
        check_range("size", size, ctypes.c_int32)
        handles = (ctypes.c_void_p * max(size, 1))()
        on_wait = on_wait_fields(options.pop("on_wait", None), on_threads=True)
        config = group_config(on_wait=False, **options)
        for name, value in on_wait.items():
            setattr(config, name, value)
        check(lib.group_from_threads(size, ctypes.byref(config), handles))
        return [Group(handle) for handle in handles]

    def subgroup(self, members: Iterable[int]) -> "Group":
        """A group of `members`, ascending ranks of this group including this one. Called by the members only. Works on a
        poisoned group too, so the survivors of a failure can continue."""
        ranks = list(members)
        handle = ctypes.c_void_p()
        array = int_array("members", ranks, ctypes.c_int32)
        check(lib.group_subgroup(self._handle, array, len(ranks), ctypes.byref(handle)), self.rank)
        return Group(handle.value)

    def all_reduce(self, *arrays: Any) -> None:
        """Sums arrays over the ranks, in place, with the same bits on every rank. Host memory; fp64, fp32, bf16, fp16 or
        int64; number, dtypes and shapes must be identical on every rank. Collective."""
        marshal = Marshal()
        tensors = (CTensor * max(len(arrays), 1))()
        for index, array in enumerate(arrays):
            marshal.put_output(tensors, index * ctypes.sizeof(CTensor), array)
        marshal.call(self.rank, lib.group_all_reduce, self._handle, tensors, len(arrays))

    def reduce_scatter(self, source: Any, out: Any) -> None:
        """Sums `source`, which has the same shape on every rank, and writes this rank's part of the sum to `out`. The
        parts are contiguous, in rank order, and may differ in size. Otherwise as all_reduce."""
        marshal = Marshal()
        tensors = (CTensor * 2)()
        marshal.put(tensors, 0, source)
        marshal.put_output(tensors, ctypes.sizeof(CTensor), out)
        output = ctypes.byref(tensors, ctypes.sizeof(CTensor))
        marshal.call(self.rank, lib.group_reduce_scatter, self._handle, tensors, output)

    def check(self) -> None:
        """Raises the failure that poisoned the group, if any."""
        check(lib.group_check(self._handle))

    @property
    def is_poisoned(self) -> bool:
        """Whether a failure has ended the group: every further call fails. See subgroup."""
        return bool(self._describe().is_poisoned)

    @property
    def pool_bytes(self) -> int:
        """Memory held for results and staging."""
        return self._describe().pool_bytes

    @property
    def window_bytes(self) -> int:
        """Memory held that is reachable by the ranks of this node."""
        return self._describe().window_bytes

    def leave(self, reason: Optional[str] = None) -> None:
        """Tells the peers that this rank makes no further calls. The reason becomes part of their errors."""
        lib.group_leave(self._handle, reason.encode() if reason is not None else None)

    def close(self) -> None:
        """Leaves the group. Its memory is freed once everything made with it is gone. Never waits for other ranks; does
        nothing the second time."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._disown()
            lib.group_destroy(handle)

    @property
    def closed(self) -> bool:
        return self._handle is None

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<crossdock.Group: rank {self.rank} of {self.size}, {self.communicator}>"

    def _describe(self) -> GroupInfo:
        info = GroupInfo()
        check(lib.group_describe(self._handle, ctypes.byref(info)))
        return info


_open_groups: List["weakref.ref[Group]"] = []


def _close_all() -> None:
    """At the end of the interpreter. Daemon threads may be in calls, whose objects must then stay as they are."""
    if lib.end_calls(1.0):
        for reference in _open_groups:
            group = reference()
            if group is not None:
                group.close()


atexit.register(_close_all)
