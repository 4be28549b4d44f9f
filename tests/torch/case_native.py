"""The compiled calls: the same results and errors as in Python, for plain tensors only."""
import contextlib
import itertools

import torch
from cases import case, error_of, random_of, random_routes, same_everywhere, tokens_of

from crossdock.torch import Dispatcher, calls, native

E, K, D = 6, 2, 4
HAS_EXCHANGE = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")  # torch 2.10 and later
FUNCTIONS = ("send", "dispatch_backward", "combine", "combine_unweighted", "combine_backward", "collect_routes")


@contextlib.contextmanager
def counted(only_python=False):
    """Counts the calls that are made natively; `only_python` leaves all of them to Python."""
    taken = dict.fromkeys(FUNCTIONS, 0)
    originals = {name: getattr(native, name) for name in FUNCTIONS}

    def counting(name):
        def call(*args):
            made = None if only_python else originals[name](*args)
            taken[name] += made is not None
            return made

        return call

    try:
        for name in FUNCTIONS:
            setattr(native, name, counting(name))
        yield taken
    finally:
        for name in FUNCTIONS:
            setattr(native, name, originals[name])


def results(dispatcher, x, routing, weights, with_row_weights):
    """Every result and gradient of a step."""
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    sent = dispatcher.dispatch(x, routing, weights, row_weights=with_row_weights)
    y = sent.rows * 3
    if with_row_weights:
        y = y * sent.row_weights[:, None].to(y.dtype)
    out = dispatcher.combine(y, sent.handle, weighted=not with_row_weights)
    out.backward(torch.arange(out.numel()).reshape(out.shape).to(out.dtype))
    return [sent.rows, sent.row_weights, sent.tokens_per_expert, out, x.grad, weights.grad]


def assert_same(found, wanted):
    for one, other in zip(found, wanted):
        assert (one is None) == (other is None)
        assert one is None or (one.dtype == other.dtype and torch.equal(one, other)), (one, other)


def inputs(rank, world, dtype=torch.float32, ids_dtype=torch.int64, weights_dtype=torch.float32):
    generator, tokens = random_of(rank), tokens_of(rank, world)
    x = torch.randint(-8, 8, (tokens, D), generator=generator).to(dtype)
    ids = random_routes(generator, tokens, E, K)
    weights = torch.randint(1, 8, (tokens, E), generator=generator).to(weights_dtype) / 8
    if ids_dtype == torch.bool:
        return x, torch.zeros(tokens, E, dtype=torch.bool).scatter_(1, ids, True), weights
    return x, ids.to(ids_dtype), weights[:, :K].contiguous()


@case(1)
def the_module_is_there(rank, world):
    assert native.IS_LOADED == HAS_EXCHANGE


@case(1, 2, 4)
def results_are_those_of_python(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for dtype, ids_dtype, with_row_weights in itertools.product(dtypes, (torch.int32, torch.int64, torch.bool), (False, True)):
        weights_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        given = inputs(rank, world, dtype, ids_dtype, weights_dtype)
        with counted() as taken:
            found = results(dispatcher, *given, with_row_weights)
        with counted(only_python=True):
            wanted = results(dispatcher, *given, with_row_weights)
        assert_same(found, wanted)
        back = ("combine_unweighted", "collect_routes") if with_row_weights else ("combine", "combine_backward")
        for name in ("send", "dispatch_backward", *back):
            assert taken[name] == HAS_EXCHANGE, (name, taken)


class Subclass(torch.Tensor):
    pass


@case(1, 2)
def only_plain_tensors_are_taken(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = inputs(rank, world)
    wanted = dispatcher.dispatch(x, ids, weights).rows
    others = [
        (x.t().contiguous().t(), ids, weights),
        (x, ids.t().contiguous().t(), weights),
        (x, ids, weights.double()),
        (x, ids, weights.as_subclass(Subclass)),
    ]
    for given in others if rank == 0 else [(x, ids, weights)] * len(others):  # rank 0 has several tokens
        with counted() as taken:
            assert torch.equal(dispatcher.dispatch(*given).rows, wanted)
        assert taken["send"] == (rank > 0 and HAS_EXCHANGE)
    sent = dispatcher.dispatch(x, ids, weights)
    spread = torch.empty(sent.rows.shape[0], 2 * D)[:, ::2].copy_(sent.rows)
    with counted() as taken:
        assert torch.equal(dispatcher.combine(spread, sent.handle), dispatcher.combine(sent.rows, sent.handle))
    assert taken["combine"] <= 1 or sent.rows.shape[0] <= 1


@case(1, 2)
def many_rows_are_memory_of_the_library(rank, world):
    wide = calls._FEW_VALUES // 2
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=wide)
    x = torch.arange(3 * wide, dtype=torch.float32).reshape(3, wide) + rank
    ids, weights = torch.tensor([[0, 5], [1, 4], [2, 3]]), torch.full((3, K), 0.5)
    for with_row_weights in (False, True):
        sends, original = [], calls.Core.send

        def counted_send(self, *arguments):
            sends.append(self)
            return original(self, *arguments)

        calls.Core.send = counted_send
        try:
            with counted() as taken:
                found = results(dispatcher, x, ids, weights, with_row_weights)
        finally:
            calls.Core.send = original
        # Forward; the backward of a combine without weights is also a dispatch.
        assert len(sends) == 1 + with_row_weights and taken["combine_backward"] == 0
        with counted(only_python=True):
            assert_same(found, results(dispatcher, x, ids, weights, with_row_weights))


@case(2, 4)
def ranks_may_have_neither_tokens_nor_experts(rank, world):
    dispatcher = Dispatcher(num_experts=1, top_k=1, width=D)
    tokens = 3 if rank == 1 else 0
    x, ids, weights = torch.full((tokens, D), 2.0), torch.zeros(tokens, 1, dtype=torch.int64), torch.full((tokens, 1), 0.5)
    with counted() as taken:
        found = results(dispatcher, x, ids, weights, with_row_weights=False)
    assert taken["send"] == taken["combine_backward"] == HAS_EXCHANGE
    assert found[0].shape == (3 if rank == 0 else 0, D) and found[2].tolist() == ([3] if rank == 0 else [])
    assert torch.equal(found[3], 1.5 * x)


@case(1, 2)
def errors_are_those_of_python(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = inputs(rank, world)
    wrong = [
        (x.new_ones(x.shape[0], D + 1), ids, weights),
        (x, ids.float() if rank == 0 else ids, weights),
        (x, ids + E if rank == 0 else ids, weights),
        (x.new_ones(x.shape[0] + 1, D) if rank == 0 else x, ids, weights),
    ]
    for given in wrong:
        error = error_of(lambda: dispatcher.dispatch(*given))
        with counted(only_python=True):
            assert str(error_of(lambda: dispatcher.dispatch(*given))) == str(error)
        same_everywhere(str(error))
    sent = dispatcher.dispatch(x, ids, weights)
    wrong_rows = sent.rows.new_ones(sent.rows.shape[0] + 1, D) if rank == 0 else sent.rows
    error = error_of(lambda: dispatcher.combine(wrong_rows, sent.handle))
    with counted(only_python=True):
        assert str(error_of(lambda: dispatcher.combine(wrong_rows, sent.handle))) == str(error)
    same_everywhere(str(error))
    dispatcher.combine(sent.rows, sent.handle)
