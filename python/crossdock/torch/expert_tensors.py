"""The parameters of experts in a state_dict: torch.distributed.checkpoint (DCP) sees them as parts of one tensor [E, ...]."""
import copy
from multiprocessing.reduction import ForkingPickler
from typing import Any, List, NamedTuple, NoReturn, Optional, Sequence, Tuple

import torch
from torch import nn

_Disabled = getattr(torch._C, "DisableTorchFunctionSubclass", None) or torch._C.DisableTorchFunction  # before torch 2.0

# The copies that programs make of a state_dict before they save it, torch's own asynchronous checkpoints among them.
_COPIES = {
    getattr(torch.Tensor, name)
    for name in ("bfloat16", "clone", "contiguous", "cpu", "cuda", "detach", "double", "float", "half", "new_empty", "set_")
} | {torch.clone, torch.detach, torch.empty_like, torch.Tensor.pin_memory, torch.Tensor.to}
_SIZED = {torch.Tensor.new_empty, torch.Tensor.set_}


class Place(NamedTuple):
    """Where the rows of a local tensor [N, ...] are in the tensor [E, ...] of all experts."""

    ids: Tuple[int, ...]  #: [N] the expert of each row
    shape: Tuple[int, ...]  #: of the local tensor
    whole: Optional[Tuple[int, ...]]  #: shape of the tensor of all experts; None: E is not known
    offsets: Tuple[int, ...]  #: first index of the local tensor in dimensions 1, 2, ...; not 0 if FSDP2 sharded them

    def runs(self) -> List[Tuple[int, int]]:
        """Rows with consecutive experts, as (first row, rows): each run is one chunk of a checkpoint."""
        ids, found = self.ids, []
        for row, expert in enumerate(ids):
            if row == 0 or expert != ids[row - 1] + 1:
                found.append((row, 0))
            found[-1] = (found[-1][0], found[-1][1] + 1)
        return found


class ExpertTensor(torch.Tensor):
    """The parameters of this rank's experts.

    It computes as the local tensor that it is, and `shape` is local. DCP sees its part of a tensor [E, ...]: `size()` is the
    size of that tensor, which DCP compares with the checkpoint's. Copies keep the place, also those sent to another process;
    computations and torch.save make plain tensors.
    """

    place: Place

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = getattr(args[0], "place", None) if args else None
        if place is not None and function in _SIZED:  # sizes that the caller has from size()
            args = [place.shape if isinstance(given, torch.Size) and given == place.whole else given for given in args]
        with _Disabled():
            result = function(*args, **(kwargs or {}))
        return marked(result, place) if place is not None and function in _COPIES else result

    def size(self, dim: Optional[int] = None) -> Any:  # type: ignore[override]
        size = torch.Size(self.place.whole or self.place.shape)
        return size if dim is None else size[dim]

    def __repr__(self, **options: Any) -> str:
        return f"ExpertTensor of experts {list(self.place.ids)}: {plain(self)!r}"

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return marked(copy.deepcopy(plain(self), memo), self.place)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)

    # ---- What DCP asks of tensors that know their parts (torch 2.6 and later) ----

    def __create_chunk_list__(self) -> list:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        place, local = self.place, plain(self)
        if place.whole is None:
            _refuse()
        return [
            ChunkStorageMetadata(
                offsets=torch.Size((place.ids[row], *place.offsets)), sizes=torch.Size((count, *local.shape[1:]))
            )
            for row, count in place.runs()
        ]

    def __create_write_items__(self, name: str, _: Any) -> list:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties, whole = TensorProperties.create_from_tensor(plain(self)), self.size()
        items = []
        for chunk in self.__create_chunk_list__():
            data = TensorWriteData(chunk=chunk, properties=properties, size=whole)
            items.append(WriteItem(index=MetadataIndex(name, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data))
        return items

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        for row, count in self.place.runs():
            if index.offset is not None and self.place.ids[row] == index.offset[0]:
                return plain(self)[row : row + count]
        raise ValueError(f"{index.fqn}: this rank has no experts from {index.offset} on, only {list(self.place.ids)}")


ForkingPickler.register(ExpertTensor, lambda tensor: (marked, (plain(tensor), tensor.place)))


def marked(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    """The tensor as an ExpertTensor that shares its memory."""
    with _Disabled():
        result = tensor.as_subclass(ExpertTensor)
    result.place = place
    return result


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The opposite of `marked`."""
    with _Disabled():
        return tensor.as_subclass(torch.Tensor) if type(tensor) is ExpertTensor else tensor


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor, as in FSDP2."""
    return hasattr(tensor, "device_mesh")


def to_experts(tensor: Any, ids: Sequence[int], num_experts: Optional[int]) -> torch.Tensor:
    """A tensor [E_local, ...] of the experts `ids`, or the shard of one that FSDP2 made, as an ExpertTensor that shares its
    memory."""
    if isinstance(tensor, ExpertTensor):
        return tensor
    whole = None if num_experts is None else (num_experts, *tensor.shape[1:])
    offsets = [0] * tensor.dim()
    if is_sharded(tensor):
        (chunk,) = tensor.__create_chunk_list__()
        offsets, tensor = list(chunk.offsets), tensor.to_local()
    rows = ids[offsets[0] : offsets[0] + tensor.shape[0]]
    return marked(tensor, Place(tuple(rows), tuple(tensor.shape), whole, tuple(offsets[1:])))


def like_shard(local: torch.Tensor, like: Any) -> torch.Tensor:
    """The DTensor with the layout of `like` whose shard on this rank is `local`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def own_part(given: Any, like: Any, ids: Sequence[int], num_experts: Optional[int]) -> Any:
    """What `like` [E_local, ...], which may be a DTensor, takes from an ExpertTensor, or from the tensor of all experts."""
    if type(given) is ExpertTensor:
        have = to_experts(like.detach(), ids, num_experts).place.ids
        if given.place.ids != have:
            raise ValueError(
                f"the state_dict holds experts {list(given.place.ids)}, but this rank has {list(have)}; load a state_dict of "
                "other ranks with torch.distributed.checkpoint (docs/checkpoints.md)"
            )
        return like_shard(plain(given), like) if is_sharded(like) else plain(given)
    if isinstance(given, torch.Tensor) and not is_sharded(given) and given.dim() > 0:
        if given.shape[0] == num_experts and given.shape[0] != like.shape[0]:
            given = given[list(ids)]
        if is_sharded(like):
            from torch.distributed.tensor import distribute_tensor

            return distribute_tensor(given.to(like.device), like.device_mesh, like.placements)
    return given


# ---- Modules ----


def number_experts(module: nn.Module, expert_ids: Sequence[int], num_experts: Optional[int] = None) -> None:
    """Tells a module whose parameters are all [E_local, ...] which experts of how many it has.

    DCP can then save its state_dict and load it on any number of ranks; without num_experts, DCP is refused. The module also
    loads the state_dict of one with all E experts. GroupedExperts number themselves; number experts of your own before FSDP2.
    """
    module.expert_ids, module.num_experts = list(expert_ids), num_experts  # type: ignore[assignment]
    module._register_state_dict_hook(_mark)
    module._register_load_state_dict_pre_hook(_take, with_module=True)


def _mark(module: Any, state: dict, prefix: str, _: Any) -> None:
    for name, _parameter in module.named_parameters():
        value = state.get(prefix + name)
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):  # Parameters: with keep_vars
            state[prefix + name] = to_experts(value, module.expert_ids, module.num_experts)


def _take(module: Any, state: dict, prefix: str, *_: Any) -> None:
    for name, parameter in module.named_parameters():
        if prefix + name in state:  # a copy of the caller's
            state[prefix + name] = own_part(state[prefix + name], parameter, module.expert_ids, module.num_experts)


def _refuse() -> NoReturn:
    raise RuntimeError(
        "torch.distributed.checkpoint cannot save or load this state_dict: every rank has other experts, or other parts of them, "
        "under the same names, and how many there are in all is not known. Pass num_experts to GroupedExperts, or call "
        "crossdock.torch.number_experts (docs/checkpoints.md)"
    )
