"""Inside torchtitan's MoE on GPUs, against torchtitan's MoE with all experts. The ranks may share a GPU.

gloo has no all-to-all for CUDA tensors, and NCCL refuses ranks that share a GPU. So the reference uses torchtitan's
LocalTokenDispatcher: every rank passes the tokens of all ranks through it.
"""
import torch
import torch.distributed as dist

if not hasattr(torch.compiler, "_is_non_strict_tracing"):  # torchtitan 0.3.0 with torch 2.11
    torch.compiler._is_non_strict_tracing = lambda: False

from cases import case, random_of, random_routes, rows_are_close, use_own_gpu  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torchtitan.config.override import OverrideConfig, apply_overrides  # noqa: E402
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter  # noqa: E402
from torchtitan.models.common.token_dispatcher import (  # noqa: E402
    AllToAllTokenDispatcher,
    HybridEPTokenDispatcher,
    LocalTokenDispatcher,
    TorchAOTokenDispatcher,
)

import crossdock.torchtitan  # noqa: E402

DEVICE = "cuda"
E, K, D, F, B = 8, 2, 64, 96, 2
LENGTHS = (100, 1)  # of the sequences of each rank
LIMIT = 3e-2  # torchtitan's experts compute in bf16, whatever the dtype of the tokens
DTYPES = (torch.float32, torch.bfloat16)
DISPATCHER = "crossdock.torchtitan.dispatcher"
GRAPH_DISPATCHER = ("crossdock.torchtitan.graph_dispatcher", {"capacity_factor": 1.0})


# ---- Layers ----


def config_of(dispatcher, override=None, **options):
    config = MoE.Config(
        num_experts=E,
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E),
            token_dispatcher=dispatcher.Config(num_experts=E, top_k=K, **options),
        ),
        router=TokenChoiceTopKRouter.Config(
            num_experts=E, gate=Linear.Config(in_features=D, out_features=E, bias=False), top_k=K
        ),
    )
    if override is not None:
        assert len(apply_overrides(OverrideConfig(imports=[override]), config)) == 1
    return config


def hybridep(world):
    options = dict(hidden_dim=D, num_max_tokens_per_rank=B * max(LENGTHS[:world]))
    return config_of(HybridEPTokenDispatcher, GRAPH_DISPATCHER, **options)


def ep_mesh():
    """Of all ranks. init_device_mesh would add NCCL, which ranks that share a GPU cannot use."""
    return DeviceMesh.from_group(dist.group.WORLD, DEVICE, mesh_dim_names=("ep",))


def build(config, dtype, experts, mesh):
    """With these experts in place of all: RoutedExperts works on local tensors."""
    set_spmd_backend("full_dtensor")
    moe = config.build()
    generator = random_of(0, 9)

    def make(*shape):
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    inner = moe.routed_experts.inner_experts
    for name, shape in (("w1_EFD", (E, F, D)), ("w2_EDF", (E, D, F)), ("w3_EFD", (E, F, D))):
        setattr(inner, name, torch.nn.Parameter(make(*shape)[experts].clone()))
    with torch.no_grad():
        moe.router.gate.weight.copy_(make(E, D))
    moe.to(DEVICE, dtype)
    moe._init_self_buffers(buffer_device=torch.device(DEVICE))
    moe.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return moe


def run(moe, batches, order=None):
    """Forward passes, then backward passes in this order -> outs, gradients of x, and of the parameters by name."""
    inputs = [x.detach().clone().requires_grad_() for x, _ in batches]
    outs = [moe(x) for x in inputs]
    for step in order or range(len(batches)):
        outs[step].backward(batches[step][1])
    gradients = {name: parameter.grad for name, parameter in moe.named_parameters()}
    moe.zero_grad(set_to_none=True)
    return [out.detach() for out in outs], [x.grad for x in inputs], gradients


class Problem:
    """A MoE with Crossdock that has this rank's experts, and torchtitan's with all of them and the same parameters."""

    def __init__(self, rank, world, config, dtype=torch.float32):
        use_own_gpu(rank)
        self.rank, self.world, self.dtype = rank, world, dtype
        self.local = slice(rank * E // world, (rank + 1) * E // world)
        self.reference = build(config_of(LocalTokenDispatcher), dtype, slice(0, E), None)
        self.moe = build(config, dtype, self.local, ep_mesh())
        assert isinstance(self.moe.routed_experts.token_dispatcher, crossdock.torchtitan.TokenDispatcher)

    def batch(self, rank, step=0):
        """x [B, L, D] and the gradient of out."""
        shape, generator = (B, LENGTHS[rank], D), random_of(rank, 50 + step)
        return tuple(torch.randn(shape, generator=generator).to(DEVICE, self.dtype) for _ in range(2))

    def batches(self, steps=1):
        return [self.batch(self.rank, step) for step in range(steps)]

    def wanted(self, step):
        """Out and the gradient of x of this rank, and the gradients of all parameters, summed over the ranks.

        One pass for all tokens: torch._grouped_mm gets the same rows, and no expert is without any.
        """
        each = [self.batch(rank, step) for rank in range(self.world)]
        x, grad_out = (torch.cat([tensor.reshape(1, -1, D) for tensor in tensors], dim=1) for tensors in zip(*each))
        outs, inputs, gradients = run(self.reference, [(x, grad_out)])
        sizes = [B * length for length in LENGTHS[: self.world]]
        split = (tensor[0].split(sizes)[self.rank].reshape(B, -1, D) for tensor in (outs[0], inputs[0]))
        return (*split, gradients)

    def check(self, got):
        outs, inputs, gradients = got
        sums = {name: torch.zeros(value.shape, device=DEVICE) for name, value in self.reference.named_parameters()}
        for step, (out, grad_x) in enumerate(zip(outs, inputs)):
            wanted_out, wanted_x, added = self.wanted(step)
            rows_are_close(f"out of step {step}", out, wanted_out, LIMIT)
            rows_are_close(f"gradient of x of step {step}", grad_x, wanted_x, LIMIT)
            for name, gradient in added.items():
                sums[name] += gradient
        for name, gradient in gradients.items():
            assert gradient.dtype == self.dtype and gradient.device.type == torch.device(DEVICE).type
            if "inner_experts" in name:
                rows_are_close(f"gradient of {name}", gradient, sums[name][self.local], LIMIT)
            else:  # of this rank's tokens only
                summed = gradient.float().cpu()
                dist.all_reduce(summed)
                rows_are_close(f"gradient of {name}", summed, sums[name].cpu(), LIMIT)


# ---- Cases ----


@case(1, 2)
def rows_and_sums_are_exact(rank, world):
    """Also without tokens on a rank. All values are exact in both dtypes."""
    use_own_gpu(rank)
    for dtype in DTYPES:
        for counts in ((50, 3), (7, 0), (0, 9)):
            for alignment in (1, 16):
                check_exactly(rank, world, dtype, counts, alignment)


def check_exactly(rank, world, dtype, counts, alignment):
    dispatcher = crossdock.torch.TitanTokenDispatcher(num_experts=E, top_k=K, alignment=alignment)
    dispatcher.wire_meshes(ep_mesh=ep_mesh())
    each = [exact_batch(source, counts[source], dtype) for source in range(world)]
    x, scores, ids, grad_out = each[rank]
    x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    sizes = torch.bincount(ids.reshape(-1), minlength=E)
    rows, rows_per_expert, metadata = dispatcher.dispatch(x, scores, ids, sizes)
    local = range(rank * E // world, (rank + 1) * E // world)
    wanted = []
    for e in local:
        found = torch.cat([tokens[(chosen == e).any(1)] for tokens, _, chosen, _ in each])
        wanted.append(torch.cat([found, found.new_zeros((-len(found) % alignment, D))]))
    assert rows_per_expert.device == x.device and rows_per_expert.dtype == torch.int64
    assert rows_per_expert.tolist() == [len(found) for found in wanted]
    assert torch.equal(rows, torch.cat(wanted))
    scale = torch.arange(local.start + 1, local.stop + 1, device=DEVICE).repeat_interleave(rows_per_expert)
    out = dispatcher.combine(rows * scale[:, None].to(dtype), metadata, x)
    out.backward(grad_out)
    scales = (scores.detach() * (ids + 1)).sum(1, keepdim=True)
    assert torch.equal(out, (x.detach() * scales).to(dtype))
    assert torch.equal(x.grad, (grad_out * scales).to(dtype))
    products = (x.detach().float() * grad_out.float()).sum(1, keepdim=True)
    assert torch.equal(scores.grad, products * (ids + 1))


def exact_batch(rank, tokens, dtype):
    """x [T, D], scores and ids [T, K], and the gradient of out: few bits each."""
    generator = random_of(rank, 70)
    x, grad_out = (torch.randint(-2, 3, (tokens, D), generator=generator).to(dtype) for _ in range(2))
    ids = random_routes(generator, tokens, E, K)
    scores = torch.randint(1, 3, (tokens, K), generator=generator) / 2
    return tuple(tensor.to(DEVICE) for tensor in (x, scores, ids, grad_out))


@case(1, 2)
def inside_moe(rank, world):
    for dtype in DTYPES:
        problem = Problem(rank, world, config_of(AllToAllTokenDispatcher, DISPATCHER), dtype)
        problem.check(run(problem.moe, problem.batches()))


@case(1, 2)
def inside_moe_with_aligned_segments(rank, world):
    for dtype in DTYPES:
        problem = Problem(rank, world, config_of(TorchAOTokenDispatcher, DISPATCHER, pad_multiple=16), dtype)
        assert problem.moe.routed_experts.token_dispatcher._config.alignment == 16
        problem.check(run(problem.moe, problem.batches()))


@case(1, 2)
def inside_moe_as_hybridep(rank, world):
    """Row tensors have a fixed size; unused rows follow those of the last expert."""
    for dtype in DTYPES:
        problem = Problem(rank, world, hybridep(world), dtype)
        problem.check(run(problem.moe, problem.batches()))


@case(1, 2)
def several_batches_may_be_in_flight(rank, world):
    for config in (config_of(AllToAllTokenDispatcher, DISPATCHER), hybridep(world)):
        problem = Problem(rank, world, config, torch.bfloat16)
        problem.check(run(problem.moe, problem.batches(2)))
        problem.check(run(problem.moe, problem.batches(3), order=(1, 2, 0)))


@case(1, 2)
def a_moe_may_run_in_any_stream(rank, world):
    for config in (config_of(AllToAllTokenDispatcher, DISPATCHER), hybridep(world)):
        problem = Problem(rank, world, config)
        for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
            batches = problem.batches(2)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch.cuda._sleep(50_000_000)  # a call in another stream would not wait for the tokens
                got = run(problem.moe, batches)
            torch.cuda.current_stream().wait_stream(stream)
            problem.check(got)


@case(1)
def a_step_may_be_captured(rank, world):
    """Forward and backward in one CUDA graph, as torchtitan does by default."""
    problem = Problem(rank, world, hybridep(world), torch.bfloat16)
    static_x, static_grad = problem.batch(rank)
    static_x.requires_grad_()
    names, parameters = zip(*problem.moe.named_parameters())

    def step():
        out = problem.moe(static_x)
        return (out, *torch.autograd.grad(out, (static_x, *parameters), static_grad))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out, grad_x, *gradients = step()
    for number in (1, 2, 0):
        x, grad_out = problem.batch(rank, number)
        with torch.no_grad():
            static_x.copy_(x)
            static_grad.copy_(grad_out)
        graph.replay()
        wanted_out, wanted_x, wanted = problem.wanted(number)
        rows_are_close(f"out of replay {number}", out, wanted_out, LIMIT)
        rows_are_close(f"gradient of x of replay {number}", grad_x, wanted_x, LIMIT)
        for name, gradient in zip(names, gradients):
            rows_are_close(f"gradient of {name} of replay {number}", gradient, wanted[name], LIMIT)
