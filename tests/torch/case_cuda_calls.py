"""The compiled module on GPUs: the results of the plain calls, calls in two halves, fp8, memory. The ranks may share a GPU."""
import itertools

import torch
from case_native import OPTIONS, WAYS, assert_same, layer_results, results
from cases import case, error_of, random_of, random_routes, same_everywhere, use_own_gpu

from crossdock.torch import Dispatcher, MoELayer, native

E, K, D, T = 8, 2, 256, 300


def make(rank, dtype=torch.float32, step=0):
    """Values that sums of two rows keep exactly, also in bf16."""
    use_own_gpu(rank)
    generator = random_of(rank, step)
    x = torch.randint(-8, 8, (T, D), generator=generator).to("cuda", dtype).requires_grad_()
    ids = random_routes(generator, T, E, K).cuda()
    weights = (torch.randint(1, 3, (T, K), generator=generator).float() / 2).cuda().requires_grad_()
    return x, ids, weights


@case(1)
def the_module_is_there_on_gpus(rank, world):
    assert native.module is not None


@case(1, 2)
def results_on_gpus_are_those_of_the_plain_calls(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D, max_routes_per_token=K)
    dtypes, ids_dtypes = (torch.float32, torch.bfloat16, torch.float16), (torch.int32, torch.int64, torch.bool)
    kinds = itertools.product(dtypes, ids_dtypes, (False, True))
    for dtype, ids_dtype, with_row_weights in kinds:
        x, ids, weights = (given.detach() for given in make(rank, dtype))
        if ids_dtype == torch.bool:
            weights = torch.zeros(T, E, device="cuda").scatter_(1, ids, weights)
            ids = torch.zeros(T, E, dtype=torch.bool, device="cuda").scatter_(1, ids, True)
        each = [results(made_by, dispatcher, x, ids.to(ids_dtype), weights, with_row_weights) for made_by in WAYS]
        assert_same(each[0], each[-1])
        assert all(made is None or made.is_cuda for made in each[0])


@case(1, 2)
def layers_on_gpus_are_those_of_the_plain_calls(rank, world):
    use_own_gpu(rank)
    for dtype, delay_dw in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        torch.manual_seed(0)
        made = dict(OPTIONS, dtype=dtype, device="cuda", delay_dw=delay_dw)
        layer = MoELayer(num_experts=E, top_k=K, width=64, inner=32, **made)
        x = torch.randn((T, 64), generator=random_of(rank)).to("cuda", dtype)
        found = layer_results(layer, x, torch.arange(T, device="cuda") % 7 == 2, delay_dw)
        for one, other in zip(found[0], found[-1]):
            assert (one is None) == (other is None)
            if one is not None:  # sums over tokens may be in another order
                torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@case(1, 2)
def begun_calls_on_gpus_have_the_results_and_gradients_of_others(rank, world):
    for max_rows in (None, T * K * world):
        dispatcher = Dispatcher(num_experts=E, top_k=K, width=D, max_rows=max_rows)
        x, ids, weights = make(rank)
        each = []
        for begins in (False, True):
            if begins:
                sent = dispatcher.begin_dispatch(x, ids, weights, num_chunks=2).finish()
                pending = dispatcher.begin_combine(sent.rows * 3, sent.handle)
                busy = torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")  # meanwhile
                out = pending.finish()
                assert float(busy[0, 0]) == 64
            else:
                sent = dispatcher.dispatch(x, ids, weights)
                out = dispatcher.combine(sent.rows * 3, sent.handle)
            each.append([out, *torch.autograd.grad((out * out).sum(), (x, weights))])
        torch.cuda.synchronize()
        assert_same(*each)


@case(1, 2)
def chunks_on_gpus_arrive_in_order(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank)
    wanted = dispatcher.dispatch(x, ids, weights, row_weights=False)
    for step in range(3):
        pending = dispatcher.begin_dispatch(x, ids, weights, row_weights=False, num_chunks=1 + step)
        sums, experts = [], []
        with torch.no_grad():
            for arrived, first, last in pending.chunks():
                ends = [0, *arrived.tokens_per_expert.cumsum(0).tolist()]
                sums.append(arrived.rows[ends[first] : ends[last]].double().sum())
                experts += range(first, last)
        sent = pending.finish()
        assert experts == list(range(dispatcher.num_local_experts))
        assert float(sum(sums)) == float(wanted.rows.double().sum())
        assert torch.equal(sent.rows, wanted.rows)


@case(1, 2)
def begun_calls_follow_the_current_stream(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for step, stream in enumerate([*streams, torch.cuda.default_stream()] * 2):
        x, ids, weights = make(rank, step=step)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            pending = dispatcher.begin_dispatch(x, ids, weights, row_weights=False)
            sent = pending.finish()
            out = dispatcher.begin_combine(sent.rows, sent.handle).finish()
            torch.testing.assert_close(out, x * weights.sum(1, keepdim=True), rtol=0, atol=0)
        torch.cuda.current_stream().wait_stream(stream)


@case(1)
def begun_calls_do_not_wait(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D, max_rows=T * K)
    x, ids, weights = make(rank)

    def step():
        sent = dispatcher.begin_dispatch(x, ids, weights, num_chunks=2).finish()
        return dispatcher.begin_combine(sent.rows, sent.handle).finish()

    with torch.no_grad():
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000_000)  # 2 s
        step()
        done = torch.cuda.Event()
        done.record()
        is_pending = not done.query()
        torch.cuda.synchronize()
    assert is_pending, "the host waited for the GPU"


@case(1, 2)
def dropped_calls_on_gpus_end(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank)
    for _ in range(10):
        with dispatcher.begin_dispatch(x, ids, weights):
            pass
        pending = dispatcher.begin_dispatch(x, ids, weights)
        del pending
    sent = dispatcher.dispatch(x, ids, weights)
    assert torch.equal(dispatcher.combine(sent.rows, sent.handle), x * weights.sum(1, keepdim=True))


@case(1, 2)
def fp8_tokens_on_gpus_bring_their_scales(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank)
    x = x.detach().to(torch.float8_e4m3fn)
    token = torch.arange(T, device="cuda", dtype=torch.float32)[:, None]
    scales = 2.0 ** (token % 3) * (1 + torch.arange(D // 128, device="cuda"))
    for given, group in ((scales, 128), (scales.repeat_interleave(4, dim=1).to(torch.float8_e8m0fnu), 32)):
        wide = x.float() * given.float().repeat_interleave(group, dim=1)
        wanted = dispatcher.dispatch(wide, ids, weights).rows
        for begins in (False, True):
            sent = (dispatcher.begin_dispatch if begins else dispatcher.dispatch)((x, given), ids, weights)
            sent = sent.finish() if begins else sent
            assert sent.rows.dtype == x.dtype and sent.row_scales.dtype == given.dtype
            assert torch.equal(sent.rows.float() * sent.row_scales.float().repeat_interleave(group, dim=1), wanted)


@case(2)
def unusable_tensors_on_gpus_are_the_same_error_on_every_rank(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(0)
    for wrong in ((x.to(torch.complex64), ids, weights), (x, ids.cpu(), weights), (x, ids, weights.to("meta"))):
        given = wrong if rank == 1 else (x, ids, weights)
        same_everywhere(str(error_of(lambda: dispatcher.dispatch(*given))))  # noqa: B023
    sent = dispatcher.dispatch(x, ids, weights)
    assert torch.equal(dispatcher.combine(sent.rows, sent.handle), x * weights.sum(1, keepdim=True))


@case(1, 2)
def many_calls_leave_no_memory_on_the_gpu(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank)

    def step():
        sent = dispatcher.dispatch(x, ids, weights, row_weights=False)
        dispatcher.combine(sent.rows, sent.handle).sum().backward()
        pending = dispatcher.begin_dispatch(x, ids, weights)
        dispatcher.begin_combine(pending.finish().rows, sent.handle).finish()
        x.grad = weights.grad = None

    for _ in range(20):
        step()
    torch.cuda.synchronize()
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    for _ in range(500):
        step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert world > 1 or free - torch.cuda.mem_get_info()[0] < 64 << 20
