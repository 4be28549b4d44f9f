"""PyTorch's all-to-all path against Crossdock: python -m crossdock.compare --world 4

Runs the same random layer through both on that many processes of this machine, checks outputs and gradients, and prints
both times. Under torchrun it uses torchrun's processes.

PyTorch's path is torchtitan's unmodified dispatcher if torchtitan is installed, else the same steps in plain
torch: sort by expert, exchange counts, exchange rows with all_to_all_single, sort by local expert, and back.
"""
import argparse
import json
import os
import sys
import tempfile
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist

from .torch import GroupedExperts, TitanTokenDispatcher

PRESETS = {  # of layers: D, F, E, K
    "qwen3-30b-a3b": dict(width=2048, inner=768, experts=128, top_k=8),
    "gpt-oss-120b": dict(width=2880, inner=2880, experts=128, top_k=4),
    "gpt-oss-20b": dict(width=2880, inner=2880, experts=32, top_k=4),
}


class _AllToAll(torch.autograd.Function):
    """Sends rows to other ranks, by numbers of rows per rank, and returns their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, received: List[int], sent: List[int]) -> torch.Tensor:
        ctx.received, ctx.sent = received, sent
        out = rows.new_empty((sum(received),) + tuple(rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple:
        out = grad.new_empty((sum(ctx.sent),) + tuple(grad.shape[1:]))
        dist.all_to_all_single(out, grad.contiguous(), ctx.sent, ctx.received)
        return out, None, None


class TorchTokenDispatcher:
    """torchtitan's AllToAllTokenDispatcher, step by step in plain torch."""

    name = "torch (all-to-all)"

    def __init__(self, *, num_experts: int, top_k: int):
        self.num_experts = num_experts
        self.top_k = top_k

    def dispatch(self, x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor, counts: torch.Tensor) -> Tuple:
        world = dist.get_world_size()
        by_expert = torch.argsort(expert_ids.reshape(-1), stable=True)
        tokens = by_expert // self.top_k
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        sent = counts.view(world, -1).sum(1).tolist()
        received = arriving.view(world, -1).sum(1).tolist()
        rows = _AllToAll.apply(x[tokens], received, sent)
        order = _by_local_expert(arriving.view(world, -1))
        metadata = (tokens, weights.reshape(-1)[by_expert], order, received, sent)
        return rows[order], arriving.view(world, -1).sum(0), metadata

    def combine(self, y: torch.Tensor, metadata: Tuple, x: torch.Tensor) -> torch.Tensor:
        tokens, weights, order, received, sent = metadata
        arrived = y.new_empty(y.shape)
        arrived = arrived.index_copy(0, order, y)
        returned = _AllToAll.apply(arrived, sent, received)
        weighted = (returned.float() * weights.reshape(-1, 1)).to(y.dtype)
        return torch.zeros_like(x).index_add(0, tokens, weighted)


def _by_local_expert(counts: torch.Tensor) -> torch.Tensor:
    """[P, E_local] rows per source and expert -> the order by expert of rows that arrive by source."""
    num_local_experts = counts.shape[1]
    expert = torch.arange(num_local_experts, device=counts.device).repeat(counts.shape[0])
    return torch.argsort(expert.repeat_interleave(counts.reshape(-1)), stable=True)


def _torch_path(options: argparse.Namespace) -> Tuple[str, Any]:
    try:
        from torchtitan.distributed.utils import set_spmd_backend
        from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
    except Exception:  # not installed, or not for this version of torch
        plain = TorchTokenDispatcher(num_experts=options.experts, top_k=options.top_k)
        return plain.name, plain
    if not hasattr(torch.compiler, "_is_non_strict_tracing"):  # torchtitan 0.3.0 with torch 2.11
        torch.compiler._is_non_strict_tracing = lambda: False
    set_spmd_backend("full_dtensor")
    config = AllToAllTokenDispatcher.Config(num_experts=options.experts, top_k=options.top_k)
    made = config.build()
    made.wire_meshes(ep_mesh=_mesh(options))
    return "torchtitan (all-to-all)", made


def _mesh(options: argparse.Namespace) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(options.device, (dist.get_world_size(),), mesh_dim_names=("ep",))


def _crossdock_path(options: argparse.Namespace) -> Tuple[str, Any]:
    made = TitanTokenDispatcher(num_experts=options.experts, top_k=options.top_k)
    made.wire_meshes(ep_mesh=dist.group.WORLD)
    return "crossdock", made


# ---- The layer ----


def _inputs(options: argparse.Namespace, device: torch.device) -> Dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(options.seed + dist.get_rank())
    shape = (options.tokens, options.width)
    x = torch.randn(shape, generator=generator)
    scores = torch.rand((options.tokens, options.experts), generator=generator)
    weights, expert_ids = scores.topk(options.top_k, dim=-1)
    dtype = getattr(torch, options.dtype)
    return {
        "x": x.to(device, dtype),
        "weights": weights.to(device),
        "expert_ids": expert_ids.to(device),
        "counts": torch.bincount(expert_ids.reshape(-1), minlength=options.experts).to(device),
        "grad_out": torch.randn(shape, generator=generator).to(device, dtype),
    }


def _make_experts(options: argparse.Namespace, device: torch.device) -> Callable:
    """SwiGLU networks of inner width F, or, if F is not given, one factor per expert and rank."""
    num_local = options.experts // dist.get_world_size()
    first = dist.get_rank() * num_local + 1
    if options.inner:
        torch.manual_seed(first)
        dtype = getattr(torch, options.dtype)
        return GroupedExperts(num_local, options.width, options.inner, device=device, dtype=dtype)

    def scale(rows: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        factors = torch.arange(first, first + num_local, device=rows.device, dtype=rows.dtype) / 16
        return rows * factors.repeat_interleave(tokens_per_expert)[:, None]

    return scale


def _run(dispatcher: Any, experts: Callable, inputs: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """Runs forward and backward once. Returns outputs and gradients."""
    x = inputs["x"].detach().requires_grad_()
    weights = inputs["weights"].detach().requires_grad_()
    rows, counts, metadata = dispatcher.dispatch(x, weights, inputs["expert_ids"], inputs["counts"])
    out = dispatcher.combine(experts(rows, counts), metadata, x)
    out.backward(inputs["grad_out"])
    found = {"out": out.detach(), "grad of x": x.grad, "grad of weights": weights.grad}
    if isinstance(experts, torch.nn.Module):
        for name, parameter in experts.named_parameters():
            found["grad of " + name], parameter.grad = parameter.grad, None
    return found


def _forward(dispatcher: Any, inputs: Dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        rows, _, metadata = dispatcher.dispatch(
            inputs["x"], inputs["weights"], inputs["expert_ids"], inputs["counts"]
        )
        dispatcher.combine(rows, metadata, inputs["x"])


def _seconds(work: Callable[[], Any], options: argparse.Namespace) -> float:
    """The median of `repeat` runs, each timed by its slowest rank."""
    times = []
    for _ in range(options.warmup + options.repeat):
        _wait(options)
        start = time.perf_counter()
        work()
        _wait_device(options)
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(times[options.warmup :], dtype=torch.float64, device=options.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.median())


def _wait(options: argparse.Namespace) -> None:
    _wait_device(options)
    dist.barrier()


def _wait_device(options: argparse.Namespace) -> None:
    if options.device == "cuda":
        torch.cuda.synchronize()


def _largest_difference(a: Dict[str, torch.Tensor], b: Dict[str, torch.Tensor]) -> Dict[str, float]:
    """Relative to the largest value, over all ranks."""
    found = {}
    for name in a:
        pair = torch.zeros(2, dtype=torch.float64, device=a[name].device)
        if a[name].numel():
            pair[0] = (a[name].double() - b[name].double()).abs().max()
            pair[1] = a[name].double().abs().max()
        dist.all_reduce(pair, op=dist.ReduceOp.MAX)
        found[name] = float(pair[0] / max(float(pair[1]), 1e-30))
    return found


# ---- The command ----

SHAPE = ("tokens", "width", "top_k", "experts", "inner", "dtype", "device")


def compare(options: argparse.Namespace) -> Dict[str, Any]:
    """Runs on every rank of the default process group. The result is identical on every rank."""
    if options.experts % dist.get_world_size():
        raise ValueError(f"--experts ({options.experts}) must be a multiple of the ranks ({dist.get_world_size()})")
    device = torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    inputs, experts = _inputs(options, device), _make_experts(options, device)
    paths = [_torch_path(options), _crossdock_path(options)]
    results = [_run(made, experts, inputs) for _, made in paths]
    differences = _largest_difference(*results)
    del results
    times = {}
    for name, made in paths:
        times[name] = {
            "dispatch + combine": _seconds(lambda made=made: _forward(made, inputs), options),
            "with experts and backward": _seconds(lambda made=made: _run(made, experts, inputs), options),
        }
    tolerance = {"float64": 1e-12, "float32": 1e-6}.get(options.dtype, 2e-2)
    return {
        "shape": {name: getattr(options, name) for name in SHAPE},
        "world": dist.get_world_size(),
        "differences": differences,
        "equal": all(difference <= tolerance for difference in differences.values()),
        "seconds": times,
    }


def _print(result: Dict[str, Any]) -> None:
    shape = result["shape"]
    print(
        f"{result['world']} ranks, T{shape['tokens']} D{shape['width']} K{shape['top_k']} E{shape['experts']} "
        f"{'F' + str(shape['inner']) + ' ' if shape['inner'] else ''}{shape['dtype']} on {shape['device']}"
    )
    for name, difference in result["differences"].items():
        print(f"  {name + ':':<20}largest difference {difference:.2g} of the largest value")
    (torch_name, torch_times), (our_name, our_times) = result["seconds"].items()
    print(f"  {'':<28}{torch_name:>26}{our_name:>14}")
    for name in torch_times:
        a, b = torch_times[name], our_times[name]
        print(f"  {name:<28}{a * 1e3:>23.2f} ms{b * 1e3:>11.2f} ms   {a / b:.1f} x")
    print("equal" if result["equal"] else "DIFFERENT")


def _rank_main(rank: int, world: int, store: Optional[str], options: argparse.Namespace) -> None:
    if options.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    backend = "nccl" if options.device == "cuda" and torch.cuda.device_count() >= world else "gloo"
    address = "env://" if store is None else f"file://{store}"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world)
    try:
        result = compare(options)
        if rank == 0 and options.json:
            print(json.dumps(result))
        elif rank == 0:
            _print(result)
    finally:
        dist.destroy_process_group()
    if not result["equal"]:
        sys.exit(1)


def _parse(arguments: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m crossdock.compare", description=__doc__.split("\n")[0])
    parser.add_argument("--world", type=int, default=4, help="processes to start (4)")
    parser.add_argument("--tokens", type=int, default=4096, help="T, tokens per rank (4096)")
    parser.add_argument("--width", type=int, default=2048, help="D, values per token (2048)")
    parser.add_argument("--top-k", type=int, default=8, help="K, routes per token (8)")
    parser.add_argument("--experts", type=int, default=64, help="E, a multiple of the number of ranks (64)")
    parser.add_argument("--inner", type=int, help="F, inner width of SwiGLU experts (none: experts scale their rows)")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="a layer's D, F, E and K")
    parser.add_argument("--dtype", default="float32", choices=["float64", "float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeat", type=int, default=5, help="timed runs; the median counts (5)")
    parser.add_argument("--warmup", type=int, default=1, help="untimed runs before them (1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(arguments)
    if options.preset:
        vars(options).update(PRESETS[options.preset])
    return options


def main(arguments: Any = None) -> int:
    options = _parse(arguments)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _rank_main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None, options)
        return 0
    import torch.multiprocessing as multiprocessing

    try:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(_rank_main, (options.world, folder + "/store", options), nprocs=options.world)
    except multiprocessing.ProcessExitedException as error:  # the rank has printed why
        return error.exit_code or 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
