"""MoELayer's router and expert bias against torchtitan's, with gradients."""
import types

import torch
import torch.distributed as dist

if not hasattr(torch.compiler, "_is_non_strict_tracing"):  # torchtitan 0.3.0 with torch 2.11
    torch.compiler._is_non_strict_tracing = lambda: False

from case_layer_options import close, forward_hook  # noqa: E402
from cases import case, random_of  # noqa: E402
from torch import nn  # noqa: E402
from torchtitan.components.optimizer.optimizer import register_moe_load_balancing_hook  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.models.common.moe import TokenChoiceTopKRouter  # noqa: E402

from crossdock.torch import MoELayer, group  # noqa: E402

E, K, D, F, B, L = 8, 2, 16, 12, 2, 7
OPTIONS = (
    (dict(score="softmax", normalise=False, report=True), dict(score_func="softmax")),
    (dict(score="softmax", scale=2.0, report=True), dict(score_func="softmax", route_norm=True, route_scale=2.0)),
    (
        dict(score="sigmoid", scale=2.5, expert_bias=True, num_groups=4, group_top_k=2, group_score="top_2"),
        dict(score_func="sigmoid", route_norm=True, route_scale=2.5, num_expert_groups=4, num_limited_groups=2),
    ),
    (dict(score="sigmoid", normalise=False, expert_bias=True), dict(score_func="sigmoid")),
    (dict(score="softmax", normalise=False, force_balance=True), dict(score_func="softmax", _debug_force_load_balance=True)),
)


def expert(x, w1, w2):
    gate, linear = (x @ w1.t()).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * linear) @ w2.t()


class Theirs(nn.Module):
    """torchtitan's router around all experts, and what its optimizer hook reads."""

    def __init__(self, layer, whole, **options):
        super().__init__()
        gate = Linear.Config(in_features=D, out_features=E, bias=False)
        self.router = TokenChoiceTopKRouter.Config(num_experts=E, gate=gate, top_k=K, **options).build()
        self.w1, self.w2 = (nn.Parameter(p.detach().clone()) for p in (whole.experts.w1, whole.experts.w2))
        self.register_buffer("expert_bias_E", None if layer.expert_bias is None else layer.expert_bias.clone())
        self.register_buffer("tokens_per_expert_E", torch.zeros(E))
        self.load_balance_coeff = 0.125
        with torch.no_grad():
            self.router.gate.weight.copy_(layer.router.weight)

    def forward(self, x):
        scores, ids, _ = self.router(x, self.expert_bias_E)
        self.tokens_per_expert_E += torch.bincount(ids.flatten(), minlength=E)
        dense = torch.stack([expert(x, w1, w2) for w1, w2 in zip(self.w1, self.w2)], dim=2)  # [B, L, E, D]
        return (dense.gather(2, ids[..., None].expand(-1, -1, -1, D)) * scores[..., None]).sum(2)


def update_their_bias(theirs):
    """As torchtitan's optimizer does it before a step."""
    hooks = []
    block = nn.Module()
    block.moe, block.moe_enabled = theirs, True
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": block})
    optimizers = types.SimpleNamespace(register_step_pre_hook=hooks.append)
    mesh = types.SimpleNamespace(get_group=lambda: dist.group.WORLD)
    dims = types.SimpleNamespace(get_optional_mesh=lambda _: mesh, ep_enabled=True, tp=1)
    register_moe_load_balancing_hook(optimizers, [model], dims)
    hooks[0]()


@case(1, 2, 4)
def choices_weights_and_bias_updates(rank, world):
    """Three steps, each followed by an update of the expert bias."""
    for ours, options in OPTIONS:
        for has_steps in (False, True):
            torch.manual_seed(3)
            sizes = dict(num_experts=E, top_k=K, width=D, inner=F)
            layer = MoELayer(**sizes, bias_update_centred=True, **ours)
            torch.manual_seed(3)
            whole = MoELayer(group(dist.new_group([rank], use_local_synchronization=True)), **sizes)
            if has_steps:
                layer.router.register_forward_hook(forward_hook)
            if layer.expert_bias is not None:
                layer.expert_bias.copy_(torch.randn(E, generator=random_of(8)) / 4)
            theirs = Theirs(layer, whole, **options)
            for step in range(3):
                x, grad_out = (torch.randn((B, L, D), generator=random_of(rank, i + 2 * step)) for i in (0, 1))
                mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
                layer.zero_grad()
                theirs.zero_grad()
                got, wanted = layer(mine), theirs(other)
                for out in (got, wanted):
                    out.backward(grad_out)
                close(got, wanted)
                close(mine.grad, other.grad)
                close(layer.router.weight.grad, theirs.router.gate.weight.grad)
                for a, b in zip(layer.experts.parameters(), (theirs.w1, theirs.w2)):
                    dist.all_reduce(b.grad)
                    close(a.grad, b.grad[layer.local_experts])
                if layer.expert_bias is not None:
                    update_their_bias(theirs)
                    layer.update_expert_bias(0.125)
                    close(layer.expert_bias, theirs.expert_bias_E)
