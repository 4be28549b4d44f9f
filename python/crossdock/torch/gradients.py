"""Gradients of models whose experts are spread over ranks: their norm, and their scale."""
import math
from typing import Any, Dict, Iterable, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import nn

import crossdock

from .expert_tensors import is_sharded
from .groups import group_of, lock_of, process_group_of
from .layer import MoELayer


def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    experts: Optional[Iterable[nn.Parameter]] = None,
    group: Any = None,
) -> torch.Tensor:
    """As torch.nn.utils.clip_grad_norm_ on one rank that has all experts: every expert counts once, and all ranks multiply
    by the same factor. Call it when gradients are reduced and scaled. Collective. Returns the norm, in fp32 or fp64.

    Parameters that are DTensors (FSDP2, tensor parallelism) count once too. Other parameters are taken for replicas.

    Args:
        model: with its MoELayers; their groups have the experts of each.
        experts: parameters of experts outside of MoELayers that other ranks do not have.
        group: the ranks that have other `experts`: as for `Dispatcher`.
    """
    norm_type = float(norm_type)
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    spread = [(layer.dispatcher.group, layer.expert_parameters()) for layer in layers]
    if experts is not None:
        spread.append((group_of(group), list(experts)))
    groups = [ranks for ranks, _ in spread]
    owners = {id(parameter): ranks for ranks, own in spread for parameter in own}
    # Parameters that are spread in the same way share one sum. Every rank has all groups, whether or not it has experts.
    ways: Dict[Tuple, List[torch.Tensor]] = {(ranks,): [] for ranks in groups}
    # With expert tensor parallelism all shards of an expert have the same b2: that of the first counts.
    repeated = {id(getattr(layer.experts, "b2", None)) for layer in layers if getattr(layer.experts, "shard", (0, 1))[0] > 0}
    gradients = []
    parameters = list(model.parameters())
    for parameter in parameters:
        way = (owners.get(id(parameter)), *_spread(parameter))
        counted = ways.setdefault(way, [])
        if parameter.grad is not None:
            gradients.append(parameter.grad.to_local() if is_sharded(parameter.grad) else parameter.grad)
            if id(parameter) not in repeated:
                counted.append(gradients[-1])
    device = parameters[0].device if parameters else torch.device("cpu")
    dtype = torch.float64 if any(parameter.dtype == torch.float64 for parameter in parameters) else torch.float32
    parts = []
    with torch.no_grad():
        for (ranks, *meshes), way in ways.items():
            part = _power_sum(way, norm_type, device, dtype)
            for mesh, dimension in meshes:
                dist.all_reduce(part, _operation(norm_type), group=mesh.get_group(dimension))
            parts.append(part if ranks is None else _over(ranks, part, norm_type))
        total = _joined(torch.stack(parts or [_power_sum([], norm_type, device, dtype)]), norm_type)
        norm = total if math.isinf(norm_type) else total ** (1 / norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"the norm of the gradients must be finite, got {norm.item()}; skip the step, or pass "
                "error_if_nonfinite=False"
            )
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))
    return norm


def scale_expert_gradients_(
    model: nn.Module, data_parallel_size: int, *, averaged_over: Optional[int] = None, experts: Iterable[nn.Parameter] = ()
) -> None:
    """Makes the gradients of experts means over data-parallel ranks, like those of all other parameters.

    An expert's gradient is the sum over the tokens of all ranks of its layer, while DDP and FSDP divide the other gradients by
    the number of ranks. So it is divided by data_parallel_size / averaged_over. Call it once per optimizer step, before
    clipping.

    Args:
        data_parallel_size: the number of ranks over whose losses the step takes the mean.
        averaged_over: the number of ranks over which a reduction has averaged the experts' gradients. Default: of a
            DTensor, the size of its mesh (FSDP2 divides by it); otherwise 1.
        experts: parameters of experts outside of MoELayers.
    """
    parameters = [p for module in model.modules() if isinstance(module, MoELayer) for p in module.expert_parameters()]
    for parameter in {id(p): p for p in [*parameters, *experts]}.values():
        if parameter.grad is not None:
            ranks = averaged_over or (parameter.device_mesh.size() if is_sharded(parameter) else 1)
            if ranks != data_parallel_size:
                parameter.grad.mul_(ranks / data_parallel_size)


# ---- Sums over ranks ----


def _spread(parameter: Any) -> List[Tuple[Any, int]]:
    """The dimensions of its mesh over which a DTensor is sharded."""
    if not is_sharded(parameter):
        return []
    mesh = parameter.device_mesh
    spread = (d for d, placement in enumerate(parameter.placements) if not placement.is_replicate())
    return [(mesh, d) for d in spread if mesh.size(d) > 1]


def _operation(norm_type: float) -> Any:
    return dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM


def _joined(parts: torch.Tensor, norm_type: float) -> torch.Tensor:
    return parts.max() if math.isinf(norm_type) else parts.sum()


def _power_sum(gradients: List[torch.Tensor], norm_type: float, device: Any, dtype: torch.dtype) -> torch.Tensor:
    """Sum of |g|^p over all values g, or their largest absolute value."""
    gradients = [gradient for gradient in gradients if gradient.numel() > 0]
    if not gradients:
        return torch.zeros((), device=device, dtype=dtype)
    norms = [torch.linalg.vector_norm(gradient, norm_type, dtype=dtype).to(device) for gradient in gradients]
    stacked = torch.stack(norms)
    return stacked.max() if math.isinf(norm_type) else stacked.pow(norm_type).sum()


def _over(ranks: crossdock.Group, part: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The parts of all ranks of a group, joined."""
    if ranks.size == 1:
        return part
    process_group = process_group_of(ranks)
    if process_group is not None:
        dist.all_reduce(part, _operation(norm_type), group=process_group)
        return part
    parts = torch.zeros(ranks.size, dtype=part.dtype, device="cpu")
    parts[ranks.rank] = part.cpu()
    with lock_of(ranks):
        ranks.all_reduce(parts)
    return _joined(parts.to(part.device), norm_type)
