"""MoELayer with the options and weights of transformers' models: their outputs and gradients. Needs transformers 5."""
import pathlib
import re

import torch
import torch.distributed as dist
from case_convert import PREFIX, D, E, F, K, close, model_of, needs_transformers
from cases import random_of

from crossdock.torch import MoELayer
from crossdock.torch.convert import from_transformers

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "pytorch.md"


def documented_options():
    """Functions from configurations to options, by family, as the page has them."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if "options_of" in block)
    found = {}
    exec(block, found)
    return found["options_of"]


@needs_transformers(1, 4)
def layers_compute_what_transformers_computes(rank, world):
    documented = documented_options()
    assert len(documented) == 4
    for family, options_of in documented.items():
        model = model_of(family)
        block = model.model.layers[1].mlp
        layer = MoELayer(num_experts=E, top_k=K, width=D, inner=F, **options_of(model.config))
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
