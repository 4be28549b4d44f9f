"""Forward-mode derivatives and transforms of torch.func, which are refused on every rank; compiled, in case_compile."""
import torch
from cases import case, error_of, raises, random_of, same_everywhere
from torch.autograd import forward_ad

from crossdock.torch import Dispatcher, GroupedExperts, MoELayer
from crossdock.torch.library_experts import Form, expert_mlp

E, K, D, F, T = 4, 2, 8, 8, 3
WORDS = ("does not support forward-mode derivatives or transforms of torch.func", "use backward")
IDS, COUNTS = torch.tensor([[0, 1]] * T), torch.tensor([1, 1, 1, 0])


def tangent_of(function):
    """A call in forward mode: the tangent of the result, which is None or 0 if an operator drops it."""

    def call(x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent

    return call


def transforms():
    """Each takes a function of x and returns another one."""
    yield tangent_of
    if hasattr(torch, "func"):  # torch 2.0
        yield lambda function: lambda x: torch.func.jvp(function, (x,), (torch.ones_like(x),))
        yield lambda function: torch.func.grad(lambda x: function(x).sum())
        yield lambda function: lambda x: torch.func.vjp(function, x)[1](torch.ones_like(x))
        yield lambda function: lambda x: torch.func.vmap(function)(torch.stack([x, x]))
        yield lambda function: torch.func.jacrev(function)


def collective_calls():
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    layer = MoELayer(num_experts=E, top_k=K, width=D, inner=F)
    sent = dispatcher.dispatch(torch.ones(T, D), IDS, torch.ones(T, K))
    return {
        "dispatch": lambda x: dispatcher.dispatch(x, IDS, torch.ones(T, K)).rows,
        "combine": lambda x: dispatcher.combine(x.sum() * sent.rows, sent.handle),
        "combine_unweighted": lambda x: dispatcher.combine(x.sum() * sent.rows, sent.handle, weighted=False),
        "layer": layer,
    }


@case(1, 2)
def calls_in_a_transform_are_the_same_error_on_every_rank(rank, world):
    calls = collective_calls()
    x = torch.randn(T, D, generator=random_of(rank))
    for transform in transforms():
        for name, call in calls.items():
            # On the last rank only, then on all of them.
            for is_transformed in (rank == world - 1, True):
                error = error_of(lambda call=call, t=transform, use=is_transformed: (t(call) if use else call)(x))
                same_everywhere(str(error))
                assert all(word in str(error) for word in WORDS), f"{name}: {error}"
    for call in calls.values():  # the group stays usable
        call(x)


@case(1)
def tangents_are_never_dropped(rank, world):
    """Also where the autograd functions do not refuse them: without gradients, and where modes observe operators."""
    calls, x = collective_calls(), torch.ones(T, D)
    for call in calls.values():
        with torch.no_grad():
            assert all(word in str(error_of(lambda call=call: tangent_of(call)(x))) for word in WORDS)
    if hasattr(torch, "func"):
        from torch.utils._python_dispatch import TorchDispatchMode

        class Observer(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                return function(*args, **(kwargs or {}))

        for call in calls.values():
            with Observer():
                assert all(word in str(error_of(lambda call=call: tangent_of(call)(x))) for word in WORDS)


@case(1, 2)
def tangents_of_gradients_are_refused(rank, world):
    """Backward in forward mode, as for products with a Hessian."""
    for name, call in collective_calls().items():
        x = torch.ones(T, D, requires_grad=True)
        out = call(x)
        with forward_ad.dual_level():
            grad = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
            error = error_of(lambda out=out, x=x, grad=grad: torch.autograd.grad(out, x, grad))
        same_everywhere(str(error))
        assert all(word in str(error) for word in WORDS), f"{name}: {error}"


@case(1)
def experts_refuse_transforms(rank, world):
    experts = GroupedExperts(E, D, F)
    calls = (
        lambda x: experts(x, COUNTS),
        lambda x: expert_mlp(x, None, experts.w1, experts.w2, None, None, COUNTS, *Form(), True)[0],
    )
    for transform in transforms():
        for call in calls:
            with raises(RuntimeError, *WORDS):
                transform(call)(torch.ones(T, D))


@case(1)
def values_without_tangents_pass_in_forward_mode(rank, world):
    x = torch.ones(T, D)
    with forward_ad.dual_level():
        for call in collective_calls().values():
            assert torch.isfinite(call(x)).all()
