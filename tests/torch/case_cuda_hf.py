"""Experts and expert parallelism in transformers on GPUs. The ranks may share one. Needs transformers 5.23.

Meshes of experts modules are those of CPUs: Crossdock only takes the ranks from them, and with gloo they work anywhere.
"""
import warnings

import hf_experts
import hf_models
import torch
import torch.distributed as dist
from cases import case, random_of, use_own_gpu
from hf_parallel import check_module, part_of
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed import DistributedConfig

import crossdock.transformers
from crossdock.transformers import experts
from crossdock.transformers.expert_parallel import CrossdockEP

crossdock.transformers.register()

DEVICE, DTYPE = "cuda", torch.bfloat16
K = hf_experts.K
RUN = ("qwen3_moe", "deepseek_v4", "gemma4", "nemotron_h", "muse_spark")  # by the library
STEPS = 8


def make(folder, implementation="crossdock", dtype=DTYPE):
    return hf_experts.make_experts(hf_experts.classes_of(folder)[0], implementation, dtype).to(DEVICE)


@case(1)
def experts_differ_from_fp32_no_more_than_grouped_mm(rank, world):
    """Transposed parameters (gpt_oss) fall back."""
    experts._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for folder in (*RUN, "gpt_oss"):
            module, exact = make(folder), make(folder, "eager", torch.float32)
            exact.load_state_dict({name: value.float() for name, value in module.state_dict().items()})
            for tokens in (40, 1, 0):
                x, ids, weights = hf_experts.inputs_of(module, tokens, DTYPE)
                wide = [tensor.detach().float().requires_grad_() for tensor in (x, weights)]
                wanted = hf_experts.results_of(exact, wide[0], ids, wide[1], "eager") if tokens else {}
                errors = {}
                for implementation in ("crossdock", "grouped_mm")[: 2 if tokens else 1]:
                    got = hf_experts.results_of(module, x, ids, weights, implementation)
                    got = {name: value.float() for name, value in got.items()}
                    errors[implementation] = hf_experts.largest_difference(got, wanted)[0]
                assert not tokens or errors["crossdock"] <= 1.5 * errors["grouped_mm"], (folder, tokens, errors)
    texts = [str(warning.message) for warning in caught if "crossdock" in str(warning.message)]
    assert len(texts) == 1 and "GptOssExperts: on a GPU the library does not read transposed" in texts[0], texts


@case(1)
def a_forward_of_experts_and_expert_parallelism_may_be_captured(rank, world):
    T = 64
    module = make("qwen3_moe")
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("ep", "tp"))
    try:
        crossdock.transformers.register(max_rows=T * K)
        parallel = CrossdockEP(part_of(module, 0, 1), mesh["ep"], mesh["tp"])
    finally:
        crossdock.transformers.register()
    static = [tensor.detach() for tensor in hf_experts.inputs_of(module, T, DTYPE)]
    for forward in (module, parallel):
        with torch.no_grad():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    forward(*static)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                out = forward(*static)
            for seed in range(3):
                for tensor, value in zip(static, hf_experts.inputs_of(module, T, DTYPE, seed)):
                    tensor.copy_(value)
                graph.replay()
                assert torch.equal(out, forward(*static)), seed
                module.config._experts_implementation = "grouped_mm"
                torch.testing.assert_close(out, module(*static), rtol=5e-2, atol=5e-2)
                module.config._experts_implementation = "crossdock"


@case(1)
def compilers_accept_any_number_of_tokens(rank, world):
    torch._dynamo.reset()
    module = make("qwen3_moe")
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for tokens in (9, 4, 17, 100):
        x, ids, weights = hf_experts.inputs_of(module, tokens, DTYPE)
        results = []
        for forward in (compiled, module):
            out = forward(x, ids, weights)
            results.append([out, *torch.autograd.grad(out.float().square().sum(), [x, weights, module.down_proj])])
        for got, want in zip(*results):
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * want.abs().max().item())


def losses_of(model, batches, share=lambda loss: loss):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=batches, labels=batches).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(share(loss.detach().float()).item())
    return losses


def are_close(got, wanted):
    """Differences grow in training, quickly in bf16."""
    torch.testing.assert_close(torch.tensor(got[:3]), torch.tensor(wanted[:3]), rtol=3e-2, atol=0)
    assert all(losses[-1] < 0.85 * losses[0] for losses in (got, wanted)), (got, wanted)


def batch_of(rank):
    return torch.randint(3, hf_models.SIZES["vocab_size"], (4, 16), generator=random_of(rank)).to(DEVICE)


@case(1)
def a_model_trains_like_grouped_mm(rank, world):
    made = {}
    for implementation in ("crossdock", "grouped_mm"):
        model = hf_models.make("qwen3_moe", experts_implementation=implementation).to(DEVICE, DTYPE).train()
        made[implementation] = losses_of(model, batch_of(0))
    are_close(*made.values())


@case(2)
def experts_modules_equal_one_rank(rank, world):
    """With tp 2 the ranks share tokens, and each sends a part."""
    use_own_gpu(rank)
    for folder in (*RUN, "gpt_oss"):
        for tp in (1, 2):
            check_module(hf_experts.classes_of(folder)[0], rank, world, tp, DTYPE, DEVICE)


@case(2)
def a_model_with_fsdp_and_expert_parallelism_trains_like_one_rank(rank, world):
    use_own_gpu(rank)
    parallel = DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation="crossdock")
    with hf_models.folder("qwen3_moe") as path:
        one = hf_models.load("qwen3_moe", path, DTYPE, experts_implementation="grouped_mm").to(DEVICE).train()
        many = hf_models.load("qwen3_moe", path, DTYPE, distributed_config=parallel).train()

    def mean(loss):
        loss = loss.cpu()
        dist.all_reduce(loss)
        return loss / world

    got = losses_of(many, batch_of(rank), mean)
    want = losses_of(one, torch.cat([batch_of(r) for r in range(world)]))
    are_close(got, want)
