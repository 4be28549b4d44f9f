"""The compiled module (crossdock.torch.native): the same results and errors as the plain calls, and no leaks."""
import contextlib
import gc
import itertools
import sys

import torch
from cases import case, error_of, live_plans, random_of, random_routes, same_everywhere, tokens_of

from crossdock.torch import Dispatcher, MoELayer, calls, native, plain

E, K, D = 6, 2, 4
HAS_EXCHANGE = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")  # torch 2.10 and later
WAYS = [calls._made_by] if native.module is None else [native.module, plain]


def results(made_by, dispatcher, x, routing, weights, with_row_weights):
    """Every result and gradient of a step, with experts that multiply by 3."""
    rows, row_weights, counts, plan = made_by.dispatch(x, routing, weights, dispatcher._key, with_row_weights)
    y = rows * 3
    if with_row_weights:
        out = made_by.combine_unweighted(y, plan, x.shape[0])
    else:
        out = made_by.combine(y, weights, routing, plan)
    grad_out = (torch.arange(out.numel(), device=out.device) % 13 - 6).reshape(out.shape).to(out.dtype)  # sums are exact
    grad_y, grad_weights = made_by.combine_backward(grad_out, y, routing, plan)
    unweighted = made_by.combine_unweighted_backward(grad_out, plan, rows.shape[0])
    grad_x = made_by.dispatch_backward(grad_y, plan, x.shape[0])
    collected = None
    if row_weights is not None:
        collected = made_by.collect_routes(row_weights.to(grad_weights.dtype), routing, plan)
    return [rows, row_weights, counts, out, grad_y, grad_weights, unweighted, grad_x, collected]


def assert_same(found, wanted):
    for one, other in zip(found, wanted):
        assert (one is None) == (other is None)
        assert one is None or (one.dtype == other.dtype and torch.equal(one, other)), (one, other)


def inputs(rank, world, dtype=torch.float32, ids_dtype=torch.int64, weights_dtype=torch.float32, width=D):
    generator, tokens = random_of(rank), tokens_of(rank, world)
    x = torch.randint(-8, 8, (tokens, width), generator=generator).to(dtype)
    ids = random_routes(generator, tokens, E, K)
    weights = torch.randint(1, 8, (tokens, E), generator=generator).to(weights_dtype) / 8
    if ids_dtype == torch.bool:
        return x, torch.zeros(tokens, E, dtype=torch.bool).scatter_(1, ids, True), weights
    return x, ids.to(ids_dtype), weights[:, :K].contiguous()


@case(1)
def the_module_is_there(rank, world):
    import os

    assert (native.module is not None) == (HAS_EXCHANGE and os.environ.get("CROSSDOCK_TORCH_NATIVE") != "0")


@case(1, 2, 4)
def results_are_those_of_the_plain_calls(rank, world):
    """Small rows and rows in the library's memory; every dtype of tokens, ids and weights."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    weights_dtypes = (torch.float64, torch.float32, torch.bfloat16)
    for width in (D, 8192):
        dispatcher = Dispatcher(num_experts=E, top_k=K, width=width)
        options = itertools.product(dtypes, (torch.int32, torch.int64, torch.bool), weights_dtypes, (False, True))
        for dtype, ids_dtype, weights_dtype, with_row_weights in options:
            given = inputs(rank, world, dtype, ids_dtype, weights_dtype, width)
            each = [results(made_by, dispatcher, *given, with_row_weights) for made_by in WAYS]
            assert_same(each[0], each[-1])


class Subclass(torch.Tensor):
    pass


@case(1, 2)
def all_kinds_of_tensors_are_taken(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = inputs(rank, world)
    wanted = calls.dispatch(x, ids, weights, dispatcher._key, True)
    others = [
        (x.t().contiguous().t(), ids, weights),
        (x, ids.t().contiguous().t(), weights),
        (x, ids, weights.double()),
        (x, ids, weights.as_subclass(Subclass)),
        (torch.nn.Parameter(x), ids, weights.clone().requires_grad_()),
    ]
    for made_by, given in itertools.product(WAYS, others if rank == 0 else [(x, ids, weights)] * len(others)):
        rows, row_weights, counts, plan = made_by.dispatch(*given, dispatcher._key, True)
        assert_same([rows, row_weights.float(), counts], wanted[:3])
        spread = torch.empty(rows.shape[0], 2 * D)[:, ::2].copy_(rows.detach())
        assert torch.equal(made_by.combine(spread, weights, ids, plan), made_by.combine(rows, weights, ids, plan))


@case(2, 4)
def ranks_may_have_neither_tokens_nor_experts(rank, world):
    dispatcher = Dispatcher(num_experts=1, top_k=1, width=D)
    tokens = 3 if rank == 1 else 0
    x, ids, weights = torch.full((tokens, D), 2.0), torch.zeros(tokens, 1, dtype=torch.int64), torch.full((tokens, 1), 0.5)
    for made_by in WAYS:
        rows, _, counts, out, *_ = results(made_by, dispatcher, x, ids, weights, with_row_weights=False)
        assert rows.shape == (3 if rank == 0 else 0, D) and counts.tolist() == ([3] if rank == 0 else [])
        assert torch.equal(out, 1.5 * x)


@case(1, 2)
def errors_are_those_of_the_plain_calls(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = inputs(rank, world)
    wrong = [
        (x.new_ones(x.shape[0], D + 1), ids, weights),
        (x, ids.float() if rank == 0 else ids, weights),
        (x, ids + E if rank == 0 else ids, weights),
        (x.new_ones(x.shape[0] + 1, D) if rank == 0 else x, ids, weights),
        (x.to(torch.complex64) if rank == 0 else x, ids, weights),
        (x.to("meta") if rank == 0 else x, ids, weights),
        (x, ids, weights.to_sparse() if rank == 0 else weights),
    ]
    for given in wrong:
        errors = [error_of(lambda: made_by.dispatch(*given, dispatcher._key, True)) for made_by in WAYS]  # noqa: B023
        assert str(errors[0]) == str(errors[-1]), errors
        assert type(errors[0].__cause__) is type(errors[-1].__cause__)
        same_everywhere(str(errors[0]))
    for made_by in WAYS:
        rows, _, _, plan = made_by.dispatch(x, ids, weights, dispatcher._key, False)
        for wrong_rows in (rows.new_ones(rows.shape[0] + 1, D), rows.to(torch.complex64)):
            given = wrong_rows if rank == 0 else rows
            same_everywhere(str(error_of(lambda: made_by.combine(given, weights, ids, plan))))  # noqa: B023
        made_by.combine(rows, weights, ids, plan)


@case(1)
def numbers_of_nothing_are_refused(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = inputs(rank, world)
    key = dispatcher._key
    for made_by in WAYS:
        rows, _, _, plan = made_by.dispatch(x, ids, weights, key, False)
        copied = plan.clone()
        assert torch.equal(made_by.combine(rows, weights, ids, copied), made_by.combine(rows, weights, ids, plan))
        del plan
        for wrong in (copied, torch.tensor([0]), torch.zeros(3)):
            with contextlib.suppress(RuntimeError):
                made_by.combine(rows, weights, ids, wrong)
                raise AssertionError("a plan that does not exist was used")
    core = dispatcher._core
    dispatcher.close()
    for made_by in WAYS:
        error = error_of(lambda: made_by.dispatch(x, ids, weights, key, False))  # noqa: B023
        assert "the dispatcher has been closed" in str(error)
    del dispatcher, rows, core
    gc.collect()
    for made_by in WAYS:
        with contextlib.suppress(RuntimeError):
            made_by.dispatch(x, ids, weights, key, False)
            raise AssertionError("a dispatcher that does not exist was used")


# ---- Layers ----

OPTIONS = dict(expert_bias=True, router_bias=True, bias=True, shared_inner=5, aux_loss_coeffs={"batch": 0.5}, z_loss_coeff=0.25)


def layer_results(layer, x, mask, delay_dw=False):
    """Results of a forward and a backward of the library's layer, by the module and by the plain calls."""
    with torch.no_grad():
        parameters = (layer.router.weight, layer.router.bias, *layer._parameters_of_experts())
        tensors = (x, *parameters, layer.expert_bias, mask, None, None, None)
        library, for_module = layer._state.layer_of(x.dtype, True)
        grad_out = torch.arange(x.numel(), device=x.device).reshape(x.shape).to(x.dtype) / x.numel()
        wanted = [True, *(index % 3 > 0 for index in range(1, 10))]
        found = []
        for made_by in [plain] if native.module is None else [native, plain]:
            called = library if made_by is plain else for_module
            out, losses, saved = made_by.layer_forward(called, tensors, 1, 0, 0, None, True)
            grads = made_by.layer_backward(called, tensors[:12], grad_out, saved, wanted, 0.5, delay_dw)
            made = [*grads[3:]]
            if delay_dw:
                chosen = tuple(given if want else None for given, want in zip(parameters[2:], wanted[2:]))
                assert made == [None] * 8
                made = [*made_by.layer_backward_dw(called, x, grad_out, saved, chosen)]
            assert [grad is not None for grad in grads[1:3]] + [grad is not None for grad in made] == wanted
            assert len(losses) == 5 and saved is not None
            found.append([out, *grads[:3], *made, torch.tensor(losses)])
        return found


@case(1, 2)
def layers_are_those_of_the_plain_calls(rank, world):
    for dtype, delay_dw in itertools.product((torch.float64, torch.float32, torch.bfloat16), (False, True)):
        torch.manual_seed(0)
        layer = MoELayer(num_experts=E, top_k=K, width=D, inner=8, dtype=dtype, delay_dw=delay_dw, **OPTIONS)
        x = torch.randn((5, D), generator=random_of(rank)).to(dtype)
        found = layer_results(layer, x.t().contiguous().t(), torch.arange(5) == 2, delay_dw)
        assert_same(found[0], found[-1])
        assert all(grad is None or grad.dtype == dtype for grad in found[0][:-1])


# ---- Leaks ----


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def step(dispatcher, x, ids, weights, wrong):
    sent = dispatcher.dispatch(x, ids, weights)
    out = dispatcher.combine(sent.rows * sent.row_weights[:, None], sent.handle, weighted=False)
    out.sum().backward()
    sent = dispatcher.dispatch(x, ids, weights, row_weights=False)
    dispatcher.combine(sent.rows, sent.handle).sum().backward()
    with contextlib.suppress(RuntimeError):
        dispatcher.dispatch(x, ids, wrong)


def no_leaks(num_steps):
    """Counts objects, references and memory before and after so many steps."""
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=8192)  # rows in the library's memory
    x, ids, weights = (given.detach() for given in inputs(0, 1, width=8192))
    x.requires_grad_(), weights.requires_grad_()
    arguments = (dispatcher, x, ids, weights, weights.detach().to(torch.complex64))
    for _ in range(50):  # pools and caches fill
        step(*arguments)
    gc.collect()
    watched = [x, ids, weights, arguments[-1], None, dispatcher._core, dispatcher._core.lock, torch.float32]
    references = [sys.getrefcount(one) for one in watched]
    objects, memory = len(gc.get_objects()), resident_bytes()
    for _ in range(num_steps):
        step(*arguments)
    gc.collect()
    assert live_plans() == 0
    grown = [after - before for before, after in zip(references, map(sys.getrefcount, watched))]
    assert all(abs(number) < 20 for number in grown), grown
    assert len(gc.get_objects()) - objects < 200, len(gc.get_objects()) - objects
    return resident_bytes() - memory


@case(1)
def many_calls_leave_nothing(rank, world):
    grown = no_leaks(1000)
    assert grown < 16 << 20, f"{grown} bytes more"
