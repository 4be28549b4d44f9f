"""Inside Megatron's MoELayer on GPUs, against Megatron's layer with all experts. The ranks may share a GPU.

gloo has no all-to-all for CUDA tensors, and NCCL refuses ranks that share a GPU. So Megatron's dispatcher runs on
a single rank: every rank passes the tokens of all ranks through a layer that has all experts.
"""
import re
import warnings

warnings.simplefilter("ignore")
import torch  # noqa: E402
from cases import case, random_of, random_routes, rows_are_close, use_own_gpu  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer.mlp import MLPSubmodules  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.moe.experts import SequentialMLP  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules  # noqa: E402
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

import crossdock.megatron  # noqa: E402

if not hasattr(moe_utils, "te_general_gemm"):  # megatron-core 0.16.1 without TransformerEngine
    moe_utils.te_general_gemm = None

DEVICE = "cuda"
H, F, E, K, B = 64, 96, 8, 2, 2
LENGTHS = (40, 3)  # of the sequences of each rank
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


# ---- Layers ----


def initialize(ep, etp):
    """Makes Megatron's groups, which use gloo because the default group does, unless they have these sizes."""
    if parallel_state.is_initialized():
        groups = moe_utils.get_default_pg_collection()
        if (groups.ep.size(), groups.expt_tp.size()) == (ep, etp):
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)


def groups_of_one():
    """The groups of a layer that has all experts."""
    groups = moe_utils.get_default_pg_collection()
    groups.ep = groups.expt_tp = groups.tp_ep = groups.tp
    assert groups.tp.size() == 1
    return groups


def build(groups, dtype, **options):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=2,
        num_moe_experts=E,
        moe_router_topk=K,
        moe_ffn_hidden_size=F,
        use_cpu_initialization=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        moe_router_load_balancing_type="none",
        expert_model_parallel_size=groups.ep.size(),
        expert_tensor_parallel_size=groups.expt_tp.size(),
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        **{"moe_token_dispatcher_type": "alltoall", "moe_router_dtype": "fp32", **options},
    )
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    shared = None
    if config.moe_shared_expert_intermediate_size is not None:
        shared = ModuleSpec(module=SharedExpertMLP, submodules=mlp)
    submodules = MoESubmodules(experts=ModuleSpec(module=SequentialMLP, submodules=mlp), shared_experts=shared)
    return MoELayer(config, submodules, layer_number=1, pg_collection=groups).to(DEVICE)


def with_crossdock(groups, dtype, **options):
    crossdock.megatron.install()
    try:
        return build(groups, dtype, **options)
    finally:
        crossdock.megatron.uninstall()


def run(layer, batches, order=None):
    """Forward passes, then backward passes in this order -> outs, gradients of x, and of the parameters by name."""
    inputs = [x.detach().clone().requires_grad_() for x, _ in batches]
    outs = [layer(x)[0] for x in inputs]
    for step in order or range(len(batches)):
        outs[step].backward(batches[step][1])
    return [out.detach() for out in outs], [x.grad for x in inputs], take_gradients(layer)


def take_gradients(layer):
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    layer.zero_grad(set_to_none=True)
    return gradients


class Problem:
    """A layer with Crossdock that has this rank's experts, and Megatron's with all of them and the same parameters."""

    def __init__(self, rank, world, dtype=torch.float32, etp=1, make=with_crossdock, lengths=LENGTHS, **options):
        use_own_gpu(rank)
        torch.set_float32_matmul_precision("highest")
        initialize(world // etp, etp)
        self.rank, self.world, self.dtype, self.etp, self.lengths = rank, world, dtype, etp, lengths
        self.reference = build(groups_of_one(), dtype, **{**options, "moe_shared_expert_overlap": False})
        with torch.no_grad():
            for index, (_, parameter) in enumerate(sorted(self.reference.named_parameters())):
                values = torch.randn(parameter.shape, generator=random_of(index, 9))
                parameter.copy_(values / parameter.shape[-1] ** 0.5)
        self.layer = make(moe_utils.get_default_pg_collection(), dtype, **options)
        assert isinstance(self.layer.token_dispatcher, crossdock.megatron.MegatronTokenDispatcher)
        whole = dict(self.reference.named_parameters())
        with torch.no_grad():
            for name, parameter in self.layer.named_parameters():
                parameter.copy_(self.part_of(whole, name))

    def part_of(self, whole, name):
        """Of parameters or gradients of the reference, the part that this rank has under this name."""
        if "local_experts" not in name:
            return whole[name]
        first = self.layer.local_expert_indices[0]
        tensor = whole[re.sub(r"(?<=local_experts\.)\d+", lambda index: str(int(index[0]) + first), name)]
        shard = parallel_state.get_expert_tensor_parallel_rank()
        if "linear_fc2" in name:
            return tensor.chunk(self.etp, dim=1)[shard]
        return torch.cat([half.chunk(self.etp)[shard] for half in tensor.chunk(2)])  # gate and linear part

    def batch(self, rank, step=0):
        """x [S, B, H] and the gradient of out."""
        shape, generator = (self.lengths[rank], B, H), random_of(rank, 50 + step)
        return tuple(torch.randn(shape, generator=generator).to(DEVICE, self.dtype) for _ in range(2))

    def batches(self, steps=1):
        return [self.batch(self.rank, step) for step in range(steps)]

    def check(self, got):
        outs, grad_inputs, gradients = got
        limit = LIMITS[self.dtype]
        wanted = {name: torch.zeros(value.shape, device=DEVICE) for name, value in self.reference.named_parameters()}
        for step, (out, grad_x) in enumerate(zip(outs, grad_inputs)):
            for rank in range(self.world):
                batch = self.batch(rank, step)
                if batch[0].numel() > 0:  # Megatron refuses an empty batch
                    (wanted_out,), (wanted_x,), added = run(self.reference, [batch])
                    for name, gradient in added.items():
                        if rank == self.rank or "local_experts" in name:
                            wanted[name] += gradient
                else:
                    wanted_out = wanted_x = batch[0]
                if rank == self.rank:
                    rows_are_close(f"out of step {step}", out, wanted_out, limit)
                    rows_are_close(f"gradient of x of step {step}", grad_x, wanted_x, limit)
        for name, gradient in gradients.items():
            assert gradient.dtype == self.dtype and gradient.device.type == torch.device(DEVICE).type
            rows_are_close(f"gradient of {name}", gradient, self.part_of(wanted, name), limit)


def compare(rank, world, **options):
    problem = Problem(rank, world, **options)
    problem.check(run(problem.layer, problem.batches()))


# ---- Cases ----


@case(1, 2)
def steps_move_rows_and_sums_exactly(rank, world):
    """Probabilities are not zero outside the map. All values are exact in both dtypes."""
    for dtype in LIMITS:
        dispatcher = Problem(rank, world, dtype).layer.token_dispatcher
        each = [exact_batch(source, dtype) for source in range(world)]
        x, routes, probs, grad_out = each[rank]
        x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
        given = dispatcher.dispatch_preprocess(x, routes, probs)
        rows, counts, row_probs = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*given))
        local = range(rank * E // world, (rank + 1) * E // world)
        by_expert = [(tokens, map_, weights, e) for e in local for tokens, map_, weights, _ in each]
        assert torch.equal(rows, torch.cat([tokens[map_[:, e]] for tokens, map_, _, e in by_expert]))
        assert torch.equal(row_probs, torch.cat([weights[map_[:, e], e] for _, map_, weights, e in by_expert]))
        assert counts.tolist() == [sum(int(map_[:, e].sum()) for _, map_, _, _ in each) for e in local]
        assert counts.device.type == "cpu"
        scale = torch.arange(local.start + 1, local.stop + 1).repeat_interleave(counts).to(DEVICE)
        y = (rows * row_probs[:, None] * scale[:, None]).to(dtype)
        out = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(y)))
        out.backward(grad_out)
        numbers = torch.arange(1, E + 1, device=DEVICE)
        scales = (routes * probs.detach() * numbers).sum(1, keepdim=True)
        assert torch.equal(out, (x.detach() * scales).to(dtype))
        assert torch.equal(x.grad, (grad_out * scales).to(dtype))
        products = (x.detach().float() * grad_out.float()).sum(1, keepdim=True)
        assert torch.equal(probs.grad, routes * products * numbers)


def exact_batch(rank, dtype):
    """x [T, H], map, probs and the gradient of out: few bits each."""
    generator, tokens = random_of(rank, 70), B * LENGTHS[rank]
    x, grad_out = (torch.randint(-2, 3, (tokens, H), generator=generator).to(dtype) for _ in range(2))
    routes = torch.zeros((tokens, E), dtype=torch.bool)
    routes.scatter_(1, random_routes(generator, tokens, E, K), True)
    probs = torch.randint(1, 3, (tokens, E), generator=generator) / 2
    return tuple(tensor.to(DEVICE) for tensor in (x, routes, probs, grad_out))


@case(1, 2)
def layers_have_the_references_values(rank, world):
    for dtype in LIMITS:
        compare(rank, world, dtype=dtype)
    compare(rank, world, dtype=torch.bfloat16, moe_router_dtype=None)  # probabilities in bf16
    compare(rank, world, moe_router_dtype="fp64")


@case(1, 2)
def a_dispatcher_may_be_replaced(rank, world):
    def replaced(*arguments, **options):
        layer = build(*arguments, **options)
        assert crossdock.megatron.replace(layer) == 1
        return layer

    for kind in ("allgather", "alltoall"):
        compare(rank, world, make=replaced, moe_token_dispatcher_type=kind)


@case(1, 2)
def several_batches_may_be_in_flight(rank, world):
    for dtype in LIMITS:
        problem = Problem(rank, world, dtype)
        problem.check(run(problem.layer, problem.batches(2)))
        problem.check(run(problem.layer, problem.batches(3), order=(1, 2, 0)))


@case(1, 2)
def a_layer_may_run_in_any_stream(rank, world):
    problem = Problem(rank, world)
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        batches = problem.batches(2)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # a call in another stream would not wait for the tokens
            got = run(problem.layer, batches)
        torch.cuda.current_stream().wait_stream(stream)
        problem.check(got)


@case(1, 2)
def tokens_may_be_dropped(rank, world):
    for policy in ("probs", "position"):
        dropped = dict(moe_expert_capacity_factor=0.5, moe_token_drop_policy=policy)
        compare(rank, world, **dropped)
        compare(rank, world, dtype=torch.bfloat16, moe_pad_expert_input_to_capacity=True, **dropped)
        compare(rank, world, moe_pad_expert_input_to_capacity=True, **dropped)


@case(1, 2)
def shared_experts_may_overlap(rank, world):
    """In their own stream."""
    for dtype in LIMITS:
        for overlap in (False, True):
            for gate in (False, True):
                options = dict(moe_shared_expert_gate=gate, moe_shared_expert_overlap=overlap)
                problem = Problem(rank, world, dtype, moe_shared_expert_intermediate_size=F, **options)
                for _ in range(3):
                    problem.check(run(problem.layer, problem.batches(2)))


@case(1, 2)
def a_rank_may_have_no_tokens(rank, world):
    crossdock.megatron.guard_empty_router()
    for lengths in ((0, 5), (5, 0)):
        compare(rank, world, lengths=lengths)


@case(1, 2)
def the_graph_of_a_pass_may_be_cut_between_steps(rank, world):
    problem = Problem(rank, world)
    layer, (x, grad_out) = problem.layer, problem.batch(rank)
    cuts = []

    def cut(*tensors):
        leaves = tuple(tensor.detach().requires_grad_() for tensor in tensors)
        cuts.append((tensors, leaves))
        return leaves

    x = x.clone().requires_grad_()
    probs, routes = layer.route(x)
    hidden, probs = cut(*layer.preprocess(x, probs, routes))
    rows, row_probs = cut(*layer.dispatch(hidden, probs))
    (y,) = cut(layer.routed_experts_compute(rows, row_probs)[0])
    (out,) = cut(layer.combine(y))
    out = layer.postprocess(out, None)
    out.backward(grad_out)
    for tensors, leaves in reversed(cuts):
        torch.autograd.backward(tensors, [leaf.grad for leaf in leaves])
    problem.check(([out], [x.grad], take_gradients(layer)))


@case(2)
def an_expert_may_be_split_between_ranks(rank, world):
    """Expert tensor parallelism: both ranks have a shard of every expert."""
    for dtype in LIMITS:
        compare(rank, world, dtype=dtype, etp=2)


@case(1, 2)
@torch.no_grad()
def a_cuda_graph_may_end_before_the_dispatch(rank, world):
    """As with cuda_graph_scope moe_router and moe_preprocess."""
    problem = Problem(rank, world)
    layer = problem.layer
    static_x = torch.empty_like(problem.batch(rank)[0]).normal_()

    def begin():
        probs, routes = layer.route(static_x)
        return layer.preprocess(static_x, probs, routes)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            begin()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        hidden, probs = begin()
    for step in range(3):
        x = problem.batch(rank, step)[0]
        static_x.copy_(x)
        graph.replay()
        y = layer.routed_experts_compute(*layer.dispatch(hidden, probs))[0]
        out = layer.postprocess(layer.combine(y), None)
        rows_are_close(f"replay {step}", out, problem.reference(x)[0], LIMITS[problem.dtype])
