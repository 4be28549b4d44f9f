"""One experts module of transformers, spread over ranks, against one rank with all experts and tokens. Needs 5.23."""
import copy

import hf_experts
import torch
import torch.distributed as dist
from cases import random_of
from torch.distributed.device_mesh import init_device_mesh

from crossdock.transformers.expert_parallel import CrossdockEP

E = hf_experts.E


def part_of(whole, rank, ranks):
    """The experts of one rank, as transformers leaves them: local parameters, `num_experts` of this rank."""
    part = copy.deepcopy(whole)
    for name, parameter in whole.named_parameters():
        if parameter.shape[0] == E:
            mine = parameter.detach().chunk(ranks)[rank].clone()
            part.register_parameter(name, torch.nn.Parameter(mine))
    part.num_experts, part._is_expert_parallel = E // ranks, True
    return part


def grad_of(tensor):
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def results_of_one_rank(whole, inputs, directions, rank, world, tp):
    """What this rank's part of the experts and batch should give: the experts of all ranks, on the tokens of all."""
    dtype = whole.down_proj.dtype
    leaves = [(x.detach().to(dtype).requires_grad_(), ids, w.detach().to(dtype).requires_grad_()) for x, ids, w in inputs]
    named = dict(whole.named_parameters())
    outputs = [whole(*leaf) if len(leaf[0]) else leaf[0] for leaf in leaves]  # torch's grouped products need rows
    for parameter in named.values():
        parameter.grad = None
    torch.autograd.backward(*zip(*((out, grad.to(dtype)) for out, grad in zip(outputs, directions) if len(out))))
    x, _, weights = leaves[rank // tp]
    results = {"out": outputs[rank // tp].detach(), "x": grad_of(x), "weights": grad_of(weights)}
    return {**results, **{name: p.grad.chunk(world)[rank] if p.shape[0] == E else p.grad for name, p in named.items()}}


def check_module(experts_class, rank, world, tp, dtype=torch.float32, device="cpu"):
    """Every batch has another number of tokens, the last none."""
    whole = hf_experts.make_experts(experts_class, "eager", dtype).to(device)
    part = part_of(whole, rank, world)
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("fsdp", "tp"))
    flat = init_device_mesh("cpu", (world,))
    batches = world // tp
    sizes = [0 if batches > 1 and batch == batches - 1 else 5 + 2 * batch for batch in range(batches)]
    inputs = [hf_experts.inputs_of(whole, size, dtype, seed=10 + batch) for batch, size in enumerate(sizes)]
    directions = [torch.randn(x.shape, generator=random_of(batch, 5)).to(device) for batch, (x, _, _) in enumerate(inputs)]
    wanted = results_of_one_rank(copy.deepcopy(whole).float(), inputs, directions, rank, world, tp)

    x, ids, weights = inputs[rank // tp]
    out = CrossdockEP(part, flat, mesh["tp"])(x, ids, weights)
    out.backward(directions[rank // tp].to(dtype))
    got = {"out": out.detach(), "x": x.grad, "weights": weights.grad}
    for name, parameter in part.named_parameters():
        got[name] = parameter.grad
        if whole.get_parameter(name).shape[0] != E:
            dist.all_reduce(got[name])  # a norm, whose gradient the ranks sum
    assert all(value.dtype == dtype for value in got.values())
    difference, name = hf_experts.largest_difference(in_fp32(got), wanted)
    limit = 2e-5
    if dtype != torch.float32:
        whole.config._experts_implementation = "grouped_mm"
        theirs = results_of_one_rank(whole, inputs, directions, rank, world, tp)
        limit = 1.5 * hf_experts.largest_difference(in_fp32(theirs), wanted)[0]
    assert difference <= limit, f"{experts_class.__name__}, tp {tp}: {name} differs by {difference:.1e}, not {limit:.1e}"


def in_fp32(results):
    return {name: value.float() for name, value in results.items()}
