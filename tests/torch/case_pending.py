"""Calls in two halves, chunks of local experts, and fp8 tokens with scales."""
import gc

import torch
from cases import case, error_of, first_expert, live_plans, raises, random_of, random_routes, same_everywhere, tokens_of

from crossdock.torch import Dispatcher

E, K, D = 6, 2, 256
HAS_FP8 = hasattr(torch, "float8_e4m3fn")


def make(rank, world, step=0, width=D):
    generator, tokens = random_of(rank, step), tokens_of(rank, world)
    x = torch.randint(-8, 8, (tokens, width), generator=generator).float().requires_grad_()
    ids = random_routes(generator, tokens, E, K)
    weights = (torch.randint(1, 8, (tokens, K), generator=generator).float() / 8).requires_grad_()
    return x, ids, weights


def scales_of(x):
    """The scales of fp8 tokens: fp32 per 128 values, different for every token and group."""
    groups = (x.shape[1] + 127) // 128
    tokens = torch.arange(x.shape[0], device=x.device, dtype=torch.float32)[:, None]
    return 2.0 ** (tokens % 3) * (1 + torch.arange(groups, device=x.device))


def widened(rows, scales, group=128):
    """fp8 rows times their scales."""
    return rows.float() * scales.float().repeat_interleave(group, dim=1)[:, : rows.shape[1]]


@case(1, 2, 4)
def begun_calls_have_the_results_and_gradients_of_others(rank, world):
    for width, with_row_weights in ((8, False), (D, True), (D, False)):
        dispatcher = Dispatcher(num_experts=E, top_k=K, width=width)
        given = make(rank, world, width=width)
        x, ids, weights = given
        each = []
        for begins in (False, True):
            if begins:
                sent = dispatcher.begin_dispatch(*given, row_weights=with_row_weights).finish()
                out = dispatcher.begin_combine(sent.rows * 3, sent.handle).finish()
            else:
                sent = dispatcher.dispatch(*given, row_weights=with_row_weights)
                out = dispatcher.combine(sent.rows * 3, sent.handle)
            loss = (out * out).sum()
            if with_row_weights:
                loss = loss + (sent.row_weights * sent.row_weights).sum()
            grads = torch.autograd.grad(loss, (x, weights))
            each.append([sent.rows, sent.tokens_per_expert, out, *grads])
            assert (sent.row_weights is None) == (not with_row_weights)
        assert all(torch.equal(one, other) for one, other in zip(*each))


@case(1, 2, 4)
def chunks_are_the_local_experts_in_order(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank, world)
    wanted = dispatcher.dispatch(x, ids, weights)
    pending = dispatcher.begin_dispatch(x, ids, weights, num_chunks=3)
    experts = []
    for arrived, first, last in pending.chunks():
        ends = arrived.tokens_per_expert.cumsum(0).tolist()
        rows = slice(0 if first == 0 else ends[first - 1], ends[last - 1] if last > 0 else 0)
        assert torch.equal(arrived.rows[rows], wanted.rows[rows])
        assert torch.equal(arrived.row_weights[rows], wanted.row_weights[rows])
        experts += range(first, last)
    assert experts == list(range(dispatcher.num_local_experts))
    assert list(pending.chunks()) == []
    sent = pending.finish()
    assert torch.equal(sent.rows, wanted.rows) and sent.rows.requires_grad
    assert list(pending.chunks()) == []
    assert torch.equal(dispatcher.combine(sent.rows, sent.handle), dispatcher.combine(wanted.rows, wanted.handle))


@case(1, 4)
def several_calls_may_be_pending(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    batches = [make(rank, world, step) for step in range(3)]
    pending = [dispatcher.begin_dispatch(*batch, row_weights=False) for batch in batches]
    sent = [call.finish() for call in reversed(pending)]
    combined = [dispatcher.begin_combine(one.rows, one.handle) for one in sent]
    for call, (x, _, weights) in zip(combined, reversed(batches)):
        torch.testing.assert_close(call.finish(), x * weights.sum(1, keepdim=True))


@case(1, 2)
def dropped_calls_end(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    given = make(rank, world)
    with dispatcher.begin_dispatch(*given) as pending:
        pass
    with raises(ValueError, "has been finished"):
        pending.finish()
    pending = dispatcher.begin_dispatch(*given)
    del pending
    sent = dispatcher.dispatch(*given)
    pending = dispatcher.begin_combine(sent.rows, sent.handle)
    pending.finish()
    with raises(ValueError, "has been finished"):
        pending.finish()
    del pending, sent
    gc.collect()
    assert live_plans() == 0


@case(1)
def a_closed_dispatcher_finishes_nothing(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    pending = dispatcher.begin_dispatch(*make(rank, world))
    dispatcher.close()
    assert "the dispatcher has been closed" in str(error_of(pending.finish))
    pending.close()


@case(1, 2, 4)
def fp8_tokens_bring_their_scales(rank, world):
    if not HAS_FP8:
        return
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank, world)
    x, scales = x.detach().to(torch.float8_e4m3fn), scales_of(x)
    wanted = dispatcher.dispatch(widened(x, scales), ids, weights)
    kinds = [(scales, 128)]
    if hasattr(torch, "float8_e8m0fnu"):
        kinds.append((scales.repeat_interleave(4, dim=1).to(torch.float8_e8m0fnu), 32))
    for given, group in kinds:
        wide = dispatcher.dispatch(widened(x, given, group), ids, weights).rows
        for begins in (False, True):
            call = dispatcher.begin_dispatch if begins else dispatcher.dispatch
            sent = call((x, given), ids, weights)
            sent = sent.finish() if begins else sent
            assert sent.rows.dtype == x.dtype and sent.row_scales.dtype == given.dtype
            assert torch.equal(widened(sent.rows, sent.row_scales, group), wide)
            assert torch.equal(sent.row_weights, wanted.row_weights)
        out = dispatcher.combine(widened(sent.rows, sent.row_scales, group), sent.handle)
        (got,) = torch.autograd.grad(out.sum() + sent.row_weights.sum(), weights)
        out = dispatcher.combine(wide, wanted.handle)
        (want,) = torch.autograd.grad(out.sum() + wanted.row_weights.sum(), weights, retain_graph=True)
        assert torch.equal(got, want)


@case(1, 2)
def wrong_arguments_are_the_same_error_on_every_rank(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(0, world)
    sent = dispatcher.dispatch(x, ids, weights)

    def expect(words, call, right, wrong):
        error = error_of(lambda: call(*(wrong if rank == world - 1 else right)))
        same_everywhere(str(error))
        assert words in str(error), error

    begin, scaled = dispatcher.begin_dispatch, dispatcher.dispatch
    expect("must be tensors, got", begin, (x, ids, weights), (None, ids, weights))
    expect("complex64", begin, (x, ids, weights), (x.to(torch.complex64), ids, weights))
    expect("y must be a tensor", dispatcher.begin_combine, (sent.rows, sent.handle), (None, sent.handle))
    expect("rank", dispatcher.begin_combine, (sent.rows, sent.handle), (sent.rows[:, :3], sent.handle))
    for wrong in (-1, "2", 2**40):
        error = error_of(lambda: begin(x, ids, weights, num_chunks=wrong if rank == world - 1 else 2))  # noqa: B023
        same_everywhere(str(error))
    if HAS_FP8:
        tokens, scales = x.detach().to(torch.float8_e4m3fn), scales_of(x)
        right = ((tokens, scales), ids, weights)
        expect("scales must be a tensor", scaled, right, ((tokens, 1.0), ids, weights))
        expect("scales", scaled, right, ((tokens, scales[:, :1]), ids, weights))
        expect("must be tensors, got", scaled, right, ((tokens, scales, scales), ids, weights))
        expect("have no gradients", scaled, right, ((x, scales), ids, weights))
    assert torch.equal(dispatcher.combine(sent.rows, sent.handle), x * weights.sum(1, keepdim=True))
    first = first_expert(rank, world, E)
    assert dispatcher.local_experts[0] == first
