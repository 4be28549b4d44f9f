"""A program of a user who checks types: every call of crossdock.torch, for typed.py, which runs it on one rank too."""
import tempfile
from typing import Any, Dict, List, Optional, Set, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch._ops import OpOverload

import crossdock
from crossdock.torch import (
    Checkpoint,
    Dispatched,
    Dispatcher,
    GroupedExperts,
    Handle,
    LayerReport,
    MoELayer,
    clip_grad_norm_,
    close,
    group,
    number_experts,
    save_ops,
    scale_expert_gradients_,
    set_loss_scale,
)

E, K, D, F, T = 8, 2, 16, 24, 6


class ByPosition(MoELayer):
    """Has a route of its own."""

    def route(self, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        ids = torch.arange(x.shape[0] * self.top_k).view(-1, self.top_k) % E
        return ids, torch.full(ids.shape, 1 / self.top_k)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = MoELayer(
            num_experts=E,
            top_k=K,
            width=D,
            inner=F,
            score="sigmoid",
            expert_bias=True,
            aux_loss_coeffs={"batch": 1e-2, "sequence": 1e-3},
            z_loss_coeff=1e-3,
            shared_inner=8,
            partial_sums="fp32",
            capacity_factor=None,
            placement=[0] * E,
        )
        self.head = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.moe(x))
        return y


def dispatch_rows() -> torch.Tensor:
    ranks: crossdock.Group = group()
    with Dispatcher(ranks, num_experts=E, top_k=K, width=D, alignment=8, drop_policy="position") as dispatcher:
        x, ids, weights = torch.randn(T, D), torch.arange(T * K).view(T, K) % E, torch.rand(T, K)
        sent: Dispatched = dispatcher.dispatch(x, ids, weights)
        rows: torch.Tensor = sent.rows
        row_weights: Optional[torch.Tensor] = sent.row_weights
        counts: torch.Tensor = sent.tokens_per_expert
        ends: torch.Tensor = sent.ends
        handle: Handle = sent.handle
        own: List[int] = dispatcher.local_experts
        assert row_weights is not None and int(counts.sum()) == int(ends[-1]) and len(own) == dispatcher.num_local_experts
        assert dispatcher.group is ranks and dispatcher.strategy and int(sent.tokens_per_expert_cpu.sum()) == rows.shape[0]
        alone: torch.Tensor = dispatcher.combine(rows, handle, weighted=False)
        return alone + dispatcher.combine(rows, handle)


def read(report: Optional[LayerReport]) -> float:
    assert report is not None
    loads: torch.Tensor = report.load + report.dropped
    assert loads.shape == (E,) and report.rows_per_rank.shape == (1,) and report.rows_per_expert.shape == (E,)
    assert report.expert_ids.shape == report.weights.shape and report.losses.shape == (5,)
    return report.aux_loss.item() + report.z_loss.item()


def train(model: Model) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layer = model.moe.validate()
    set_loss_scale(0.5)
    x = torch.randn(2, T, D)
    (model(x) * 0.5).sum().backward()
    set_loss_scale(lambda: 1.0)
    scale_expert_gradients_(model, data_parallel_size=1)
    norm: torch.Tensor = clip_grad_norm_(model, 1.0, norm_type=2.0, error_if_nonfinite=True)
    optimizer.step()  # pyright: ignore[reportUnknownMemberType]
    layer.update_expert_bias(1e-2, group=None)
    layer.start_step()
    layer.backward_dw()
    mask = torch.zeros(2, T, dtype=torch.bool)
    y: torch.Tensor = layer(x, padding_mask=mask, total_sequences=2)
    experts: List[nn.Parameter] = layer.expert_parameters()
    assert len(experts) == 2 and y.shape == x.shape and layer.local_experts == list(range(E))
    bias: Optional[torch.Tensor] = layer.expert_bias
    shared: Optional[GroupedExperts] = layer.shared
    assert bias is not None and shared is not None
    saved: Dict[str, Any] = Checkpoint(model, optimizer).state_dict()
    Checkpoint(model, optimizer).load_state_dict(saved)
    layer.reset_parameters()
    return norm.item() + read(layer.report)


def compute_rows() -> torch.Tensor:
    experts = GroupedExperts(2, D, F, expert_ids=[0, 1], num_experts=2, activation="geglu", bias=True, weights_in="experts")
    number_experts(experts, [0, 1], 2)
    experts.reset_parameters()
    first: torch.Tensor = experts.w1
    assert experts.b1 is not None and first.shape == (2, 2 * F, D)
    out: torch.Tensor = experts(torch.randn(5, D), torch.tensor([2, 3]), torch.rand(5))
    return out


def wrong_options(x: torch.Tensor) -> None:
    """What a checker refuses: each of these lines has an error, or the comment on it would be one."""
    MoELayer(num_experts=E, top_k=K, width=D, inner=F, aligment=8)  # pyright: ignore[reportCallIssue]
    MoELayer(num_experts=E, top_k=K, width=D, inner="24")  # pyright: ignore[reportArgumentType]
    MoELayer(num_experts=E, top_k=K, width=D, inner=F, jitter="0.1")  # pyright: ignore[reportArgumentType]
    Dispatcher(num_experts=E, top_k=K)  # pyright: ignore[reportCallIssue]
    Dispatcher(num_experts=E, top_k=K, width=D, capacity=1.0)  # pyright: ignore[reportCallIssue]
    GroupedExperts(2, D, F, activation=7)  # pyright: ignore[reportArgumentType]
    clip_grad_norm_(x, 1.0)  # pyright: ignore[reportArgumentType]


def main() -> None:
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
    operators: Set[OpOverload] = save_ops()
    layer = ByPosition(num_experts=E, top_k=K, width=D, inner=F)
    assert layer.route(torch.zeros(T, D))[0].shape == (T, K) and operators
    assert dispatch_rows().shape == (T, D) and compute_rows().shape == (5, D)
    assert train(Model()) > 0
    close()
    dist.destroy_process_group()
    print("every call returned what its type says")


if __name__ == "__main__":
    main()
