"""Cases: functions that every rank of a launch runs together."""
import contextlib
import gc
from typing import Callable, Dict, List, Tuple

import torch

import crossdock

CASES: Dict[str, Tuple[Callable, Tuple[int, ...]]] = {}


def case(*worlds: int) -> Callable:
    """Registers a case, called as function(rank, world), for launches of these sizes."""

    def register(function: Callable) -> Callable:
        CASES[f"{function.__module__}.{function.__name__}"] = (function, worlds)
        return function

    return register


def cases_of(module: str, world: int, patterns: List[str]) -> List[str]:
    """The names of a module's cases for this world size; if there are patterns, only those that match one."""

    def wanted(name: str) -> bool:
        return name.startswith(module + ".") and (not patterns or any(pattern in name for pattern in patterns))

    return [name for name, (_, worlds) in CASES.items() if world in worlds and wanted(name)]


# ---- For cases ----


def random_of(rank: int, step: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * step + rank)


def tokens_of(rank: int, world: int) -> int:
    """A different number on each rank, none on the last of several."""
    return 0 if world > 1 and rank == world - 1 else 3 + 2 * rank


def random_routes(generator: torch.Generator, tokens: int, experts: int, top_k: int) -> torch.Tensor:
    """[T, K] distinct ids."""
    return torch.rand((tokens, experts), generator=generator).argsort(dim=1)[:, :top_k].contiguous()


def first_expert(rank: int, world: int, experts: int) -> int:
    return rank * (experts // world) + min(rank, experts % world)


def scale_by_expert(rows: torch.Tensor, counts: torch.Tensor, first: int) -> torch.Tensor:
    """The experts of most cases: expert e multiplies by e + 1."""
    scale = torch.arange(first + 1, first + 1 + counts.numel(), dtype=rows.dtype).repeat_interleave(counts)
    return rows * scale[:, None]


def live_plans() -> int:
    """The number of plans in this process."""
    gc.collect()
    return sum(type(found).__name__ == "Routes" for found in gc.get_objects())


def use_own_gpu(rank: int) -> None:
    """Ranks share GPUs if there are more ranks than GPUs."""
    torch.cuda.set_device(rank % torch.cuda.device_count())


def rows_are_close(name: str, got: torch.Tensor, wanted: torch.Tensor, limit: float) -> None:
    """No row differs by more than `limit` times the norm of an average row, so a wrong row of typical size cannot pass."""
    assert got.shape == wanted.shape, f"{name}: the shape is {tuple(got.shape)}, not {tuple(wanted.shape)}"
    got, wanted = (tensor.detach().double().reshape(-1, tensor.shape[-1]) for tensor in (got, wanted))
    if wanted.numel() > 0:
        difference = (got - wanted).norm(dim=1).max().item()
        size = wanted.square().sum(1).mean().sqrt().item()
        assert difference <= limit * size, f"{name}: a row differs by {difference:.1e}, rows have a norm of {size:.1e}"


@contextlib.contextmanager
def raises(kind, *words: str):
    try:
        yield
    except kind as error:
        for word in words:
            assert word in str(error), f"{word!r} is not in: {error}"
    else:
        raise AssertionError(f"no {kind} was raised")


def same_everywhere(text: str) -> None:
    import torch.distributed as dist

    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert len(set(texts)) == 1, texts


def error_of(function: Callable) -> crossdock.Error:
    try:
        function()
    except crossdock.Error as error:
        return error
    raise AssertionError("no crossdock.Error was raised")
