"""MoELayer with the options and weights of transformers' models: their outputs and gradients. Needs transformers 5."""
import torch
import torch.distributed as dist
from case_convert import PREFIX, D, E, F, K, close, model_of, needs_transformers, normalises
from cases import random_of

from crossdock.torch import MoELayer
from crossdock.torch.convert import from_transformers

OPTIONS = {
    "qwen3_moe": dict(),
    "mixtral": dict(score="softmax_after_top_k"),
    "deepseek_v3": dict(
        score="sigmoid", scale=2.5, expert_bias=True, num_groups=2, group_top_k=1, group_score="top_2", shared_inner=2 * F
    ),
    "gpt_oss": dict(score="softmax_after_top_k", router_bias=True, bias=True, activation="clamped_swiglu"),
}


@needs_transformers(1, 4)
def layers_compute_what_transformers_computes(rank, world):
    for family, options in OPTIONS.items():
        model = model_of(family)
        block = model.model.layers[1].mlp
        if family == "gpt_oss":
            options = dict(options, limit=model.config.swiglu_limit)
        layer = MoELayer(num_experts=E, top_k=K, width=D, inner=F, normalise=normalises(model), **options)
        state = from_transformers(model.state_dict(), family, PREFIX, experts=layer.local_experts)
        layer.load_state_dict(state)
        x, grad_out = (torch.randn((1, 7 + rank, D), generator=random_of(rank, i)) for i in (0, 1))
        mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        got, wanted = layer(mine), block(other)
        wanted = wanted[0] if isinstance(wanted, tuple) else wanted
        for out in (got, wanted.reshape(x.shape)):
            out.backward(grad_out)
        close(got, wanted.reshape(x.shape))
        close(mine.grad, other.grad)
        theirs = next(value for name, value in block.named_parameters() if name in ("gate.weight", "router.weight"))
        close(layer.router.weight.grad, theirs.grad)
        if family == "deepseek_v3":
            down = block.shared_experts.down_proj.weight.grad
            close(layer.shared.w2.grad[0], down)
    dist.barrier()
