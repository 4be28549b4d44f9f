"""Rows in fp8 on GPUs: the bits of the CPU, streams, graphs, and dispatches that send them."""
import torch
from case_fp8 import E, K, bits, make, pow2_cast, rounded, rows_of
from cases import case, raises, random_of, use_own_gpu

import crossdock
from crossdock.torch import Dispatcher, dequantise_rows, quantise_rows

D = 200


@case(1)
def rows_have_the_bits_of_the_cpu(rank, world):
    use_own_gpu(rank)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for tokens, width in ((1, 1), (3, 7), (50, 200), (33, 2880), (64, 7168), (0, 128)):
            x = rows_of(tokens, random_of(width), width, dtype)
            x[1:2] = 0
            x[2:3, :1] = float("nan")
            for options in ({}, {"group": 32}, {"scale": "exact", "amax_floor": 1e-4}):
                rows = quantise_rows(x.cuda(), **options)
                wanted = quantise_rows(x, **options)
                for a, b in zip(rows, wanted):
                    assert a.is_cuda and a.dtype == b.dtype and bits(a.cpu()) == bits(b)
                for kind in (torch.bfloat16, torch.float32):
                    assert bits(dequantise_rows(*rows, kind).cpu()) == bits(dequantise_rows(*wanted, kind))


@case(1)
def rows_may_have_any_strides(rank, world):
    use_own_gpu(rank)
    x = rows_of(31, random_of(2)).cuda()
    assert bits(quantise_rows(x.t().contiguous().t()).values.cpu()) == bits(quantise_rows(x).values.cpu())
    with raises(crossdock.Error, "scales of fp8 must be fp32"):
        crossdock.quantise_rows(x, values=torch.empty(31, D, dtype=torch.float8_e4m3fn).view(torch.uint8), scales=x)


@case(1)
def work_is_queued_in_the_current_stream(rank, world):
    use_own_gpu(rank)
    x = torch.zeros((4096, 7168), dtype=torch.bfloat16, device="cuda")
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        torch.cuda._sleep(50_000_000)  # what follows in this stream is late; in another one it would see zeros
        x.fill_(3.0)
        values, scales = quantise_rows(x)
        back = dequantise_rows(values, scales)
    torch.cuda.current_stream().wait_stream(other)
    assert bool((back == 3.0).all()) and bool((scales == 2.0**-7).all())


@case(1)
def calls_can_be_captured(rank, world):
    use_own_gpu(rank)
    x = rows_of(100, random_of(3)).cuda()
    quantise_rows(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, scales = quantise_rows(x)
        back = dequantise_rows(values, scales)
    x.copy_(rows_of(100, random_of(4)))
    graph.replay()
    wanted, wanted_scales = pow2_cast(x, 128)
    assert bits(values.cpu()) == bits(wanted.cpu()) and torch.equal(scales, wanted_scales) and torch.equal(back, rounded(x))


@case(1, 2)
def dispatches_have_the_bits_of_the_cpu(rank, world):
    """Forward and backward, with and without a limit on the rows."""
    use_own_gpu(rank)
    for max_rows in (None, 64):
        options = dict(num_experts=E, top_k=K, width=D, max_rows=max_rows, wire="fp8")
        found = []
        for device in ("cpu", "cuda"):
            dispatcher = Dispatcher(**options)
            x, ids, weights = (given.to(device) for given in make(rank, world))
            x.requires_grad_(), weights.requires_grad_()
            sent = dispatcher.dispatch(x, ids, weights, row_weights=False)
            out = dispatcher.combine(sent.rows * 2, sent.handle)
            used = int(sent.tokens_per_expert.sum())
            grads = torch.autograd.grad(out.float().square().sum(), (x, weights))
            found.append([sent.rows[:used].detach().cpu(), out.detach().cpu(), grads[0].cpu(), grads[1].cpu()])
        for a, b in zip(*found):
            assert torch.allclose(a, b, rtol=1e-5, atol=0) if a.dtype == torch.float32 else torch.equal(a, b)


@case(1, 2)
def experts_may_get_rows_in_fp8(rank, world):
    use_own_gpu(rank)
    x, ids, weights = (given.cuda() for given in make(rank, world))
    options = dict(num_experts=E, top_k=K, width=D)
    kept = Dispatcher(**options, wire="fp8", wire_rows="fp8").dispatch(x, ids, weights)
    wanted = Dispatcher(**options).dispatch(rounded(x), ids, weights)
    assert kept.rows.dtype == torch.float8_e4m3fn
    assert torch.equal(dequantise_rows(kept.rows, kept.row_scales), wanted.rows)
