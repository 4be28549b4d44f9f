"""Compares runs on meshes with the same run on one rank."""
import dataclasses
from typing import Dict, List, Tuple

import torch
import torch.distributed as dist

from mesh import MeshShape, make_groups
from training import MissingGradient, Settings, Trainer


@dataclasses.dataclass(frozen=True)
class Case:
    """Differences are relative: max|a - b| / max|b|, of each tensor."""

    name: str
    settings: Settings
    steps: int = 50
    first: float = 1e-9  # allowed in step 1, in the losses and in every gradient
    later: float = 1e-7  # allowed in the losses of the other steps
    must_fall: bool = True  # the last loss is at most two thirds of the first


@dataclasses.dataclass
class Result:
    losses: List[Tuple[float, float]]  # of a token, of the routers
    gradients: Dict[str, torch.Tensor]  # of step 1, logical; {} except on the first rank
    gradient_norm: float = 0.0  # of step 1
    most_in_flight: int = 0  # micro-batches, on this rank


def train(settings: Settings, steps: int) -> Result:
    trainer = Trainer(settings)
    result = Result([], {})
    for step in range(steps):
        metrics = trainer.compute_gradients()
        if step == 0:
            result.gradients, result.gradient_norm = trainer.gradients(), metrics.gradient_norm
        trainer.update(metrics)
        result.losses.append((metrics.loss, metrics.router_loss))
    result.most_in_flight = trainer.pipeline.most_in_flight
    trainer.close()
    return result


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative to the largest value of b."""
    largest = b.abs().max().item()
    found = (a - b).abs().max().item()
    return found / largest if largest else found


def relative(a: float, b: float) -> float:
    return abs(a - b) / abs(b) if b else abs(a)


@dataclasses.dataclass
class Verdict:
    problems: List[str]
    text: str = ""  # the differences found


def judge(case: Case, got: Result, want: Result) -> Verdict:
    if got.gradients.keys() != want.gradients.keys():
        return Verdict([f"gradients of {sorted(got.gradients.keys() ^ want.gradients.keys())} are missing"])
    by_name = {name: difference(got.gradients[name], value) for name, value in want.gradients.items()}
    by_name["(norm)"] = relative(got.gradient_norm, want.gradient_norm)
    by_step = [max(map(relative, a, b)) for a, b in zip(got.losses, want.losses)]
    problems = [f"gradient of {name}: {value:.1e}" for name, value in by_name.items() if not value <= case.first]
    problems += [f"loss of step 1: {by_step[0]:.1e}"] if not by_step[0] <= case.first else []
    problems += [f"loss of step {step}: {value:.1e}" for step, value in enumerate(by_step, 1) if not value <= case.later]
    first, last = got.losses[0][0], got.losses[-1][0]
    if case.must_fall and not last <= first * 2 / 3:
        problems.append(f"the loss falls only from {first:.3f} to {last:.3f}")
    text = f"step 1: loss {by_step[0]:.0e}, gradients {max(by_name.values()):.0e}; "
    return Verdict(problems, text + f"{len(by_step)} steps: {max(by_step):.0e}; loss {first:.2f} to {last:.2f}")


class Comparison:
    """Runs cases on the processes of torch.distributed, one at a time. Every process calls everything."""

    def __init__(self) -> None:
        self._references: Dict[Settings, Result] = {}

    def run(self, case: Case) -> Verdict:
        """The same on every rank."""
        make_groups(MeshShape())
        make_groups(case.settings.mesh)
        want = self._reference(case) if dist.get_rank() == 0 else None
        dist.barrier()
        verdict = Verdict([])
        if dist.get_rank() < case.settings.mesh.world:
            try:
                got = train(case.settings, case.steps)
                verdict = judge(case, got, want) if want is not None else verdict
            except MissingGradient as error:
                verdict = Verdict([str(error)])
        shared = [verdict]
        dist.broadcast_object_list(shared, src=0)
        return shared[0]

    def _reference(self, case: Case) -> Result:
        """The same run on this rank alone."""
        alone = dataclasses.replace(
            case.settings, mesh=MeshShape(), data_parallel="sum", strategy="auto", ranks_per_node=0
        )
        found = self._references.get(alone)
        if found is None or len(found.losses) < case.steps:
            found = self._references[alone] = train(alone, case.steps)
        return found
