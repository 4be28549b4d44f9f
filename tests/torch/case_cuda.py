"""Dispatchers on GPUs: streams, memory, fixed sizes. The ranks may share one."""
import torch
from cases import case, error_of, first_expert, random_of, random_routes

from crossdock.torch import Dispatcher

E, K, D, T = 8, 2, 64, 512


def make(rank, step=0, dtype=torch.float32):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    generator = random_of(rank, step)
    x = torch.randint(-8, 8, (T, D), generator=generator).to("cuda", dtype).requires_grad_()
    ids = random_routes(generator, T, E, K).cuda()
    weights = (torch.randint(1, 8, (T, K), generator=generator).float() / 8).cuda().requires_grad_()
    return x, ids, weights


def scale(rows, counts, first):
    """Also works with unused rows after those of the last expert."""
    ends = counts.cumsum(0)
    expert = torch.bucketize(torch.arange(rows.shape[0], device=rows.device), ends, right=True)
    return rows * (expert + first + 1).to(rows.dtype)[:, None]


def layer(dispatcher, rank, world, x, ids, weights):
    sent = dispatcher.dispatch(x, ids, weights, row_weights=False)
    return dispatcher.combine(scale(sent.rows, sent.tokens_per_expert, first_expert(rank, world, E)), sent.handle)


def reference(x, ids, weights):
    return x * (weights * (ids + 1)).sum(1, keepdim=True)


def check(out, x, ids, weights):
    want = reference(x, ids, weights)
    torch.testing.assert_close(out, want, rtol=0, atol=0)
    got = torch.autograd.grad(out.sum(), (x, weights))
    for a, b in zip(got, torch.autograd.grad(want.sum(), (x, weights))):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@case(1, 2)
def values_and_gradients(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    for step in range(3):
        x, ids, weights = make(rank, step)
        check(layer(dispatcher, rank, world, x, ids, weights), x, ids, weights)


@case(1, 2)
def counts_are_where_the_tokens_are(rank, world):
    x, ids, weights = make(rank)
    sent = Dispatcher(num_experts=E, top_k=K, width=D).dispatch(x, ids, weights)
    assert sent.tokens_per_expert.is_cuda and not sent.tokens_per_expert_cpu.is_cuda
    assert int(sent.tokens_per_expert.sum()) == sent.rows.shape[0]


@case(1, 2)
def row_tensors_may_have_a_fixed_size(rank, world):
    x, ids, weights = make(rank)
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D, max_rows=T * K * world)
    assert dispatcher.dispatch(x, ids, weights).rows.shape[0] == T * K * world
    check(layer(dispatcher, rank, world, x, ids, weights), x, ids, weights)


@case(1, 2)
def calls_run_in_the_current_stream(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams + [torch.cuda.default_stream()]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            out = layer(dispatcher, rank, world, x, ids, weights)
            check(out, x, ids, weights)
        torch.cuda.current_stream().wait_stream(stream)


@case(1, 2)
def memory_may_be_freed_while_another_stream_uses_it(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank)
    side = torch.cuda.Stream()
    sums = []
    for _ in range(20):
        with torch.no_grad():
            sent = dispatcher.dispatch(x, ids, weights)
        want = sent.rows.double().sum()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)
            sums.append((sent.rows.double().sum(), want))
        sent.rows.record_stream(side)
        del sent  # the next dispatch must not get this memory before the side stream has read it
    torch.cuda.synchronize()
    assert all(float(a) == float(b) for a, b in sums)


def two_steps(*step):
    for _ in range(2):
        layer(*step)
        torch.cuda.synchronize()


@case(2)
def a_rank_that_runs_ahead_learns_of_a_refused_call(rank, world):
    """With max_rows the ranks only queue calls: rank 0 learns in its next call that rank 1 could not make this one."""
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D, max_rows=T * K * world)
    x, ids, weights = make(rank)
    for wrong in (lambda: dispatcher.dispatch("x", ids, weights), lambda: dispatcher.dispatch(x[:, :3], ids, weights)):
        for _ in range(3):
            check(layer(dispatcher, rank, world, x, ids, weights), x, ids, weights)
        error = error_of(wrong if rank == 1 else lambda: two_steps(dispatcher, rank, world, x, ids, weights))
        assert "rank 1" in str(error), error
    check(layer(dispatcher, rank, world, x, ids, weights), x, ids, weights)


@case(1)
def a_step_may_be_captured(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D, max_rows=T * K)
    x, ids, weights = make(rank)
    with torch.no_grad():
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            for _ in range(3):
                layer(dispatcher, rank, world, x, ids, weights)
        torch.cuda.current_stream().wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(dispatcher, rank, world, x, ids, weights)
        x.copy_(x + 1)
        graph.replay()
        torch.testing.assert_close(out, reference(x, ids, weights), rtol=0, atol=0)
