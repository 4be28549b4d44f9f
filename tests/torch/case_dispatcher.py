"""Values: where rows arrive, and what combine returns."""
import functools

import torch
import torch.distributed as dist
from cases import case, error_of, first_expert, random_of, random_routes, same_everywhere, scale_by_expert, tokens_of

from crossdock.torch import Dispatcher

E, K, D = 6, 2, 4


def make(rank, world, dtype=torch.float32, step=0):
    generator = random_of(rank, step)
    tokens = tokens_of(rank, world)
    x = torch.randint(-8, 8, (tokens, D), generator=generator).to(dtype)
    ids = random_routes(generator, tokens, E, K)
    weights = torch.randint(1, 8, (tokens, K), generator=generator).to(torch.float32) / 8
    return x, ids, weights


def expected(x, ids, weights):
    factors = (weights * (ids + 1) * (ids >= 0)).sum(1, keepdim=True)
    return x * factors.to(x.dtype)


@case(1, 2, 4)
def rows_are_ordered_by_expert_source_token_and_slot(rank, world):
    tokens = tokens_of(rank, world)
    x = torch.arange(tokens, dtype=torch.float32)[:, None].expand(tokens, D) + 100 * rank
    ids = random_routes(random_of(rank), tokens, E, K)
    sent = Dispatcher(num_experts=E, top_k=K, width=D).dispatch(x, ids, torch.ones(tokens, K))
    everyone = [None] * world
    dist.all_gather_object(everyone, ids.tolist())
    first = first_expert(rank, world, E)
    want = [
        100 * source + token
        for expert in range(first, first_expert(rank + 1, world, E))
        for source, routes in enumerate(everyone)
        for token, slots in enumerate(routes)
        for slot in slots
        if slot == expert
    ]
    assert sent.rows[:, 0].tolist() == want
    assert sent.rows.shape[0] == int(sent.tokens_per_expert.sum()) == len(want)
    assert sent.tokens_per_expert.dtype == torch.int64 and sent.tokens_per_expert_cpu.device.type == "cpu"
    assert sent.ends.tolist() == sent.tokens_per_expert.cumsum(0).tolist()


@case(1, 2, 4)
def combine_sums_weighted_rows(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    first = first_expert(rank, world, E)
    for ids_dtype in (torch.int32, torch.int64):
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            x, ids, weights = make(rank, world, dtype)
            sent = dispatcher.dispatch(x, ids.to(ids_dtype), weights, row_weights=False)
            assert sent.rows.dtype == dtype and sent.row_weights is None
            out = dispatcher.combine(scale_by_expert(sent.rows, sent.tokens_per_expert, first), sent.handle)
            assert out.dtype == dtype
            close = dict(rtol=0, atol=0) if dtype in (torch.float64, torch.float32) else dict(rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(out, expected(x, ids, weights), **close)


@case(1, 4)
def experts_may_apply_the_weights(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    for weights_dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x, ids, weights = make(rank, world)
        sent = dispatcher.dispatch(x, ids, weights.to(weights_dtype))
        assert sent.row_weights.dtype == weights_dtype and sent.row_weights.shape == sent.rows.shape[:1]
        y = scale_by_expert(sent.rows, sent.tokens_per_expert, first_expert(rank, world, E))
        out = dispatcher.combine(y * sent.row_weights[:, None].float(), sent.handle, weighted=False)
        torch.testing.assert_close(out, expected(x, ids, weights), rtol=0, atol=0)


@case(1, 4)
def slots_may_be_empty(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank, world)
    ids[::2, 1] = -1
    ids[1::3] = -1
    sent = dispatcher.dispatch(x, ids, weights)
    y = scale_by_expert(sent.rows, sent.tokens_per_expert, first_expert(rank, world, E))
    torch.testing.assert_close(dispatcher.combine(y, sent.handle), expected(x, ids, weights), rtol=0, atol=0)


@case(1, 4)
def maps_may_have_any_number_of_bits(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, _, _ = make(rank, world)
    routes = torch.rand((x.shape[0], E), generator=random_of(rank, 1)) < 0.5
    weights = torch.randint(1, 8, routes.shape, generator=random_of(rank, 2)).float() / 8
    sent = dispatcher.dispatch(x, routes, weights)
    y = scale_by_expert(sent.rows, sent.tokens_per_expert, first_expert(rank, world, E))
    want = x * (weights * routes * torch.arange(1, E + 1)).sum(1, keepdim=True)
    torch.testing.assert_close(dispatcher.combine(y, sent.handle), want, rtol=0, atol=0)


@case(2, 4)
def all_tokens_may_go_to_one_expert(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=1, width=D)
    x, _, _ = make(rank, world)
    ids = torch.full((x.shape[0], 1), E - 1)
    sent = dispatcher.dispatch(x, ids, torch.ones(x.shape[0], 1))
    assert (sent.rows.shape[0] > 0) == (rank == world - 1)
    assert torch.equal(dispatcher.combine(sent.rows, sent.handle), x)


@case(1, 4)
def pad_rows_are_zero_and_counted(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D, alignment=8)
    x, ids, weights = make(rank, world)
    sent = dispatcher.dispatch(x + 100, ids, weights)
    assert all(count % 8 == 0 for count in sent.tokens_per_expert.tolist())
    assert sent.rows.shape[0] == int(sent.tokens_per_expert.sum())
    is_pad = sent.rows[:, 0] == 0
    assert bool((sent.rows[is_pad] == 0).all()) and bool((sent.row_weights[is_pad] == 0).all())
    y = scale_by_expert(sent.rows, sent.tokens_per_expert, first_expert(rank, world, E))
    torch.testing.assert_close(dispatcher.combine(y, sent.handle), expected(x + 100, ids, weights), rtol=0, atol=0)


@case(1, 4)
def experts_may_have_any_place(rank, world):
    places = [(expert * 5 + 1) % world for expert in range(E)]
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D, placement=places)
    x, ids, weights = make(rank, world)
    sent = dispatcher.dispatch(x, ids, weights)
    mine = torch.tensor([expert + 1 for expert in range(E) if places[expert] == rank], dtype=x.dtype)
    assert dispatcher.num_local_experts == len(mine) == sent.tokens_per_expert.numel()
    y = sent.rows * mine.repeat_interleave(sent.tokens_per_expert)[:, None]
    torch.testing.assert_close(dispatcher.combine(y, sent.handle), expected(x, ids, weights), rtol=0, atol=0)


@case(1, 4)
def tensors_may_have_any_strides(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank, world)
    sent = dispatcher.dispatch(x.t().contiguous().t(), ids.t().contiguous().t(), weights.t().contiguous().t())
    y = scale_by_expert(sent.rows, sent.tokens_per_expert, first_expert(rank, world, E)).t().contiguous().t()
    torch.testing.assert_close(dispatcher.combine(y, sent.handle), expected(x, ids, weights), rtol=0, atol=0)


@case(1, 4)
def nonfinite_values_propagate(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=1, width=D)
    x = torch.ones(2, D, dtype=torch.float16)
    x[0, 0] = float("inf")
    weights = torch.tensor([[1.0], [float("nan")]])
    sent = dispatcher.dispatch(x, torch.zeros(2, 1, dtype=torch.int64), weights)
    out = dispatcher.combine(sent.rows, sent.handle)
    assert torch.isinf(out[0, 0]) and torch.isnan(out[1]).all()


@case(2, 4)
def an_invalid_route_is_the_same_error_on_every_rank(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(0, world)
    wrong = ids.clone()
    if rank == 1:
        wrong[2, 1] = E
    error = error_of(lambda: dispatcher.dispatch(x, wrong, weights))
    same_everywhere(str(error))
    assert error.culprit == 1
    wrong_dtype = weights.to(torch.int64) if rank == 0 else weights
    same_everywhere(str(error_of(lambda: dispatcher.dispatch(x, ids, wrong_dtype))))
    sent = dispatcher.dispatch(x, ids, weights)  # the group is usable
    y = scale_by_expert(sent.rows, sent.tokens_per_expert, first_expert(rank, world, E))
    torch.testing.assert_close(dispatcher.combine(y, sent.handle), expected(x, ids, weights), rtol=0, atol=0)


@case(2, 4)
def more_rows_than_allowed_are_the_same_error_on_every_rank(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=1, width=D, max_rows=3)
    x = torch.ones(3, D)
    ids = torch.zeros(3, 1, dtype=torch.int64)
    same_everywhere(str(error_of(lambda: dispatcher.dispatch(x, ids, torch.ones(3, 1)))))


@case(2, 4)
def an_unusable_tensor_is_the_same_error_on_every_rank(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(0, world)
    unusable = [
        (torch.tensor(1.0), ids, weights),
        (x.reshape(3, 1, 1, 1, D), ids, weights),
        (x.to(torch.complex64), ids, weights),
        (x.to("meta"), ids, weights),
        (x.to_sparse(), ids, weights),
        (x, ids.to(torch.int16), weights),
        (x, ids, torch.tensor(0.5)),
    ]
    for inputs in unusable:
        inputs = inputs if rank == 1 else (x, ids, weights)
        error = error_of(lambda inputs=inputs: dispatcher.dispatch(*inputs))
        same_everywhere(str(error))
        assert error.culprit == 1
    sent = dispatcher.dispatch(x, ids, weights)
    assert torch.equal(dispatcher.combine(sent.rows, sent.handle), x * weights.sum(1, keepdim=True))


@case(2, 4)
def an_argument_of_another_type_is_the_same_error_on_every_rank(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(0, world)
    sent = dispatcher.dispatch(x, ids, weights)

    def expect_refusal(words, call, right, wrong):
        error = error_of(lambda: call(*(wrong if rank == 1 else right)))
        same_everywhere(str(error))
        assert error.culprit == 1 and words in str(error), error
        assert isinstance(error.__cause__, TypeError) == (rank == 1)

    for wrong in ((None, ids, weights), (x.numpy(), ids, weights), (x, ids.tolist(), weights), (x, ids, 0.5)):
        expect_refusal("x, expert_ids and weights must be tensors, got", dispatcher.dispatch, (x, ids, weights), wrong)
    for weighted in (True, False):
        combine = functools.partial(dispatcher.combine, weighted=weighted)
        right = (sent.rows, sent.handle)
        expect_refusal("y must be a tensor, got NoneType", combine, right, (None, sent.handle))
        expect_refusal("rank 1", combine, right, (sent.rows, None))
        expect_refusal("rank 1", combine, right, (sent.rows, sent.handle.plan))
    assert torch.equal(dispatcher.combine(sent.rows, sent.handle), x * weights.sum(1, keepdim=True))


@case(2, 4)
def a_refused_combine_belongs_to_the_dispatcher_of_its_handle(rank, world):
    first = Dispatcher(num_experts=E, top_k=K, width=D)
    second = Dispatcher(dist.new_group(list(range(world))), num_experts=E, top_k=K, width=D)
    x, ids, weights = make(0, world)
    sent = first.dispatch(x, ids, weights)
    error = error_of(lambda: second.combine(None if rank == 1 else sent.rows, sent.handle))
    same_everywhere(str(error))
    assert error.culprit == 1 and "y must be a tensor, got NoneType" in str(error), error
    for dispatcher in (first, second):
        assert torch.equal(dispatcher.combine(sent.rows, sent.handle), x * weights.sum(1, keepdim=True))


@case(2, 4)
def a_failed_allocation_is_the_same_error_on_every_rank(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(0, world)
    original = torch.Tensor.new_empty

    def full(*_, **__):
        raise RuntimeError("no memory left")

    def error_without_memory(call):
        torch.Tensor.new_empty = full if rank == 1 else original
        try:
            error = error_of(call)
        finally:
            torch.Tensor.new_empty = original
        same_everywhere(str(error))
        assert error.culprit == 1 and (str(error.__cause__) == "no memory left") == (rank == 1)

    error_without_memory(lambda: dispatcher.dispatch(x, ids, weights))
    sent = dispatcher.dispatch(x, ids, weights)
    error_without_memory(lambda: dispatcher.combine(sent.rows, sent.handle))
    out = dispatcher.combine(sent.rows.requires_grad_(), sent.handle)
    error_without_memory(lambda: torch.autograd.backward(out, torch.ones_like(x)))
    sent = dispatcher.dispatch(x, ids, weights)
    assert torch.equal(dispatcher.combine(sent.rows, sent.handle), x * weights.sum(1, keepdim=True))
