"""Gradients, and how long plans live."""
import gc
import threading

import torch
from cases import case, first_expert, live_plans, raises, random_of, random_routes, scale_by_expert, tokens_of

from crossdock.torch import Dispatcher

E, K, D = 6, 2, 4


def make(rank, world, dtype=torch.float64, step=0, tokens=None):
    generator = random_of(rank, step)
    tokens = tokens_of(rank, world) if tokens is None else tokens
    x = torch.randn((tokens, D), generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    ids = random_routes(generator, tokens, E, K)
    weights = torch.rand((tokens, K), generator=generator, dtype=torch.float64)
    weights = weights.to(dtype if dtype == torch.float64 else torch.float32).requires_grad_()
    return x, ids, weights


def layer(dispatcher, rank, world, x, ids, weights):
    """Experts square their rows and scale them."""
    sent = dispatcher.dispatch(x, ids, weights, row_weights=False)
    y = scale_by_expert(sent.rows * sent.rows, sent.tokens_per_expert, first_expert(rank, world, E))
    return dispatcher.combine(y, sent.handle)


def reference(x, ids, weights):
    return x * x * (weights * (ids + 1)).sum(1, keepdim=True)


@case(1, 2, 4)
def gradients_equal_those_of_one_process(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank, world)
    out = layer(dispatcher, rank, world, x, ids, weights)
    got = torch.autograd.grad((out * out).sum(), (x, weights))
    out = reference(x, ids, weights)
    for a, b in zip(got, torch.autograd.grad((out * out).sum(), (x, weights))):
        assert a.is_contiguous()
        torch.testing.assert_close(a, b)


@case(1, 4)
def weights_get_gradients_through_row_weights(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank, world)
    sent = dispatcher.dispatch(x, ids, weights)
    y = scale_by_expert(sent.rows * sent.rows, sent.tokens_per_expert, first_expert(rank, world, E))
    out = dispatcher.combine(y * sent.row_weights[:, None], sent.handle, weighted=False)
    got = torch.autograd.grad((out * out).sum(), (x, weights))
    out = reference(x, ids, weights)
    for a, b in zip(got, torch.autograd.grad((out * out).sum(), (x, weights))):
        torch.testing.assert_close(a, b)


@case(1, 4)
def maps_get_gradients_of_their_shape(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, _, _ = make(rank, world)
    routes = torch.rand((x.shape[0], E), generator=random_of(rank, 1)) < 0.5
    probs = torch.rand(routes.shape, generator=random_of(rank, 2), dtype=torch.float64).requires_grad_()
    want = x * (probs * routes).sum(1, keepdim=True)
    want = torch.autograd.grad((want * want).sum(), (x, probs))
    for weighted in (True, False):
        sent = dispatcher.dispatch(x, routes, probs)
        y = sent.rows if weighted else sent.rows * sent.row_weights[:, None]
        out = dispatcher.combine(y, sent.handle, weighted=weighted)
        for a, b in zip(torch.autograd.grad((out * out).sum(), (x, probs)), want):
            torch.testing.assert_close(a, b)


@case(1, 2)
def gradcheck_passes(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank, world, tokens=2)

    def function(x, weights):
        sent = dispatcher.dispatch(x, ids, weights)
        return dispatcher.combine(sent.rows.sin() * sent.row_weights[:, None], sent.handle)

    assert torch.autograd.gradcheck(function, (x, weights))


@case(1, 4)
def gradients_may_be_expanded(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank, world, torch.float32)
    layer(dispatcher, rank, world, x, ids, weights).sum().backward()  # its gradient is an expanded scalar
    assert x.grad.shape == x.shape and weights.grad.shape == weights.shape


@case(1, 4)
def there_may_be_no_tokens_at_all(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x, ids, weights = make(rank, world, dtype, tokens=0)
        routes = torch.zeros((0, E), dtype=torch.bool)
        probs = torch.zeros((0, E)).requires_grad_()
        for routing, given in ((ids, weights), (routes, probs)):
            for weighted in (True, False):
                sent = dispatcher.dispatch(x, routing, given)
                assert sent.rows.shape == (0, D) and sent.row_weights.shape == (0,)
                assert sent.tokens_per_expert.tolist() == [0] * dispatcher.num_local_experts
                y = sent.rows if weighted else sent.rows * sent.row_weights[:, None]
                out = dispatcher.combine(y.to(dtype), sent.handle, weighted=weighted)
                assert out.shape == x.shape and out.dtype == dtype
                for grad, like in zip(torch.autograd.grad(out.sum(), (x, given)), (x, given)):
                    assert grad.shape == like.shape and grad.dtype == like.dtype and grad.is_contiguous()


@case(1, 4)
def gradients_may_be_wanted_of_one_input_only(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank, world)
    want = torch.autograd.grad(reference(x, ids, weights).sum(), (x, weights))
    out = layer(dispatcher, rank, world, x, ids, weights.detach())
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], want[0])
    out = layer(dispatcher, rank, world, x.detach(), ids, weights)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), weights)[0], want[1])
    assert not layer(dispatcher, rank, world, x.detach(), ids, weights.detach()).requires_grad


@case(1, 4)
def expanded_inputs_get_gradients(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    one = torch.ones((1, D), dtype=torch.float64).requires_grad_()
    weight = torch.full((1, 1), 0.5, dtype=torch.float64).requires_grad_()
    ids = random_routes(random_of(rank), 3, E, K)
    inputs = one.expand(3, D), ids, weight.expand(3, K)
    got = torch.autograd.grad(layer(dispatcher, rank, world, *inputs).sum(), (one, weight))
    want = torch.autograd.grad(reference(*inputs).sum(), (one, weight))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)


@case(1, 4)
def nothing_is_kept_without_gradients(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank, world)
    with torch.no_grad():
        out = layer(dispatcher, rank, world, x, ids, weights)
    assert not out.requires_grad
    assert live_plans() == 0
    torch.testing.assert_close(out, reference(x, ids, weights).detach())


@case(1, 4)
def gradients_of_gradients_are_refused(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank, world)
    out = layer(dispatcher, rank, world, x, ids, weights)
    (grad,) = torch.autograd.grad((out * out).sum(), x, create_graph=True)
    with raises(RuntimeError, "gradients of gradients"):
        grad.sum().backward()


@case(1, 4)
def several_batches_may_be_in_flight(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    batches = [make(rank, world, step=step) for step in range(4)]
    outs = [layer(dispatcher, rank, world, *batch) for batch in batches]
    for step in (2, 0, 3, 1):
        x, ids, weights = batches[step]
        got = torch.autograd.grad(outs[step].sum(), (x, weights))
        want = torch.autograd.grad(reference(x, ids, weights).sum(), (x, weights))
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b)


@case(1, 4)
def plans_end_with_their_last_use(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank, world)
    for _ in range(3):
        layer(dispatcher, rank, world, x, ids, weights).sum().backward()
    sent = dispatcher.dispatch(x, ids, weights)
    kept = sent.handle
    del sent
    assert live_plans() == 1
    del kept
    assert live_plans() == 0


@case(1, 4)
def rows_per_expert_do_not_keep_the_plan(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank, world)
    sent = dispatcher.dispatch(x, ids, weights, row_weights=False)
    counts, want = sent.tokens_per_expert, sent.tokens_per_expert.tolist()
    del sent
    assert live_plans() == 0 and counts.tolist() == want


@case(1, 4)
def saved_tensors_may_be_replaced_with_copies(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank, world)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        out = layer(dispatcher, rank, world, x, ids, weights)
    gc.collect()
    got = torch.autograd.grad(out.sum(), (x, weights))
    for a, b in zip(got, torch.autograd.grad(reference(x, ids, weights).sum(), (x, weights))):
        torch.testing.assert_close(a, b)


@case(1, 4)
def calls_leave_nothing_to_the_next(rank, world):
    """Ids after a map, rows without weights after rows with weights, a good call after a refused one."""
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank, world)
    routes = torch.zeros((x.shape[0], E), dtype=torch.bool).scatter_(1, ids, True)
    probs = torch.zeros((x.shape[0], E), dtype=torch.float64).scatter(1, ids, weights)
    want = reference(x, ids, weights)
    for _ in range(2):
        sent = dispatcher.dispatch(x, routes, probs)
        y = scale_by_expert(sent.rows * sent.rows, sent.tokens_per_expert, first_expert(rank, world, E))
        torch.testing.assert_close(dispatcher.combine(y, sent.handle), want)
        with raises(RuntimeError, "dtype"):
            dispatcher.dispatch(x, ids, weights.to(torch.complex64))
        torch.testing.assert_close(layer(dispatcher, rank, world, x, ids, weights), want)


@case(2, 4)
def backward_may_run_on_another_thread(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank, world)
    out = layer(dispatcher, rank, world, x, ids, weights)
    failures = []

    def backward():
        try:
            out.sum().backward()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert not failures, failures
    (want,) = torch.autograd.grad(reference(x, ids, weights).sum(), x)
    torch.testing.assert_close(x.grad, want)


@case(1, 4)
def checkpointing_repeats_the_calls(rank, world):
    from torch.utils.checkpoint import checkpoint

    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank, world)
    for reentrant in (True, False):
        out = checkpoint(layer, dispatcher, rank, world, x, ids, weights, use_reentrant=reentrant)
        x.grad = weights.grad = None
        out.sum().backward()
        want = torch.autograd.grad(reference(x, ids, weights).sum(), (x, weights))
        torch.testing.assert_close(x.grad, want[0])
        torch.testing.assert_close(weights.grad, want[1])


@case(1, 4)
def saved_tensors_may_be_moved(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank, world)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        out = layer(dispatcher, rank, world, x, ids, weights)
    gc.collect()
    (got,) = torch.autograd.grad(out.sum(), x)
    (want,) = torch.autograd.grad(reference(x, ids, weights).sum(), x)
    torch.testing.assert_close(got, want)


@case(1, 4)
def infinite_gradients_skip_a_step(rank, world):
    """As happens in fp16 if the loss scale is too large."""
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank, world, torch.float16, tokens=3)
    out = layer(dispatcher, rank, world, x, ids, weights)
    out.backward(torch.full_like(out, float("inf")))
    assert not torch.isfinite(x.grad).all() and not torch.isfinite(weights.grad).all()


@case(1, 4)
def many_rows_are_memory_of_the_library(rank, world):
    """Large enough that the library provides rows and their gradients on the CPU."""
    width, tokens = 256, 64
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=width)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = torch.randint(-4, 4, (tokens, width), generator=random_of(rank)).to(dtype).requires_grad_()
        ids = random_routes(random_of(rank), tokens, E, K)
        weights = torch.full((tokens, K), 0.5, dtype=torch.float32).requires_grad_()
        kept = []
        for _ in range(3):
            sent = dispatcher.dispatch(x, ids, weights, row_weights=False)
            kept.append((sent.rows, sent.rows.clone()))  # later calls must not get this memory
            y = scale_by_expert(sent.rows, sent.tokens_per_expert, first_expert(rank, world, E))
            out = dispatcher.combine(y, sent.handle)
        want = x * (weights * (ids + 1)).sum(1, keepdim=True).to(dtype)
        torch.testing.assert_close(out, want, rtol=0, atol=0)
        got = torch.autograd.grad(out.sum(), (x, weights))
        close = dict(rtol=1e-2, atol=1e-2) if dtype == torch.bfloat16 else dict(rtol=1e-6, atol=1e-6)
        for a, b in zip(got, torch.autograd.grad(want.sum(), (x, weights))):
            torch.testing.assert_close(a, b, **close)
        assert all(torch.equal(rows, copy) for rows, copy in kept)


@case(4)
def ranks_may_differ_in_whose_memory_rows_are(rank, world):
    """All rows go to rank 0, whose rows are in the library's memory; the others have none."""
    width, tokens = 256, 64
    dispatcher = Dispatcher(num_experts=E, top_k=1, width=width)
    x = torch.randint(-4, 4, (tokens, width), generator=random_of(rank)).float().requires_grad_()
    weights = torch.full((tokens, 1), 0.5).requires_grad_()
    sent = dispatcher.dispatch(x, torch.zeros((tokens, 1), dtype=torch.int64), weights, row_weights=False)
    assert sent.rows.shape[0] == (tokens * world if rank == 0 else 0)
    out = dispatcher.combine(sent.rows * 2, sent.handle)
    assert torch.equal(out, x)
    grad_x, grad_weights = torch.autograd.grad(out.sum(), (x, weights))
    assert torch.equal(grad_x, torch.ones_like(x))
    torch.testing.assert_close(grad_weights, 2 * x.detach().sum(1, keepdim=True))
