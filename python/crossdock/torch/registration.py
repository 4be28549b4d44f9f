"""Differentiable operators, `torch.ops.crossdock.*`.

With torch 2.4 and later they are operators with fake versions, so torch.compile keeps the graph whole and selective
checkpointing can name them. In eager mode, and with older versions, they are autograd functions.
"""
from typing import Any, Callable, NoReturn, Optional, Tuple, Type

import torch
from torch.autograd import forward_ad

HAS_OPERATORS = hasattr(torch.library, "register_fake") and hasattr(torch.library, "register_autograd")

_library = torch.library.Library("crossdock", "DEF") if HAS_OPERATORS else None  # the operators live as long as it does
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_num_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_are_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


def define(
    name: str,
    schema: str,
    call: Callable,
    fake: Callable,
    save: Callable,
    gradient: Callable,
    operator_call: Optional[Callable] = None,
    eager: Optional[Callable] = None,
    refuse: Optional[Callable] = None,
) -> Callable:
    """Returns a function that runs the operator if anything observes operators, else the call itself, which is several
    times cheaper.

    Args:
        name: of the operator.
        schema: its arguments and results.
        call: what it does.
        fake: its results without values, for compilers.
        save: keeps in ctx what the gradient needs: save(ctx, inputs, output).
        gradient: gradient(ctx, *gradients of the results) -> gradients of the inputs.
        operator_call: `call` with the results that the schema promises, if these differ.
        eager: the call with its gradient, used if nothing observes operators. Default: made from the above.
        refuse: refuse(error, inputs) raises the error on all ranks that make the call. Default: on this one.
    """
    eager = eager or eager_function(name, call, save, gradient)
    operator = None
    if _library is not None:
        _library.define(name + schema)
        _library.impl(name, operator_call or call, "CompositeExplicitAutograd")
        torch.library.register_fake("crossdock::" + name, fake, lib=_library)
        torch.library.register_autograd("crossdock::" + name, gradient, setup_context=save, lib=_library)
        operator = getattr(torch.ops.crossdock, name).default

    def run(*inputs: Any) -> Any:
        observed = operator is not None and is_observed(inputs[0])
        if (observed or forward_ad._current_level >= 0) and is_transformed(inputs):
            (refuse or _raise)(transform_error(), inputs)
        return operator(*inputs) if observed else eager(*inputs)

    run.__name__ = name
    run.__doc__ = call.__doc__
    return run


def refuse_gradient(ctx: Any, *grads: Any) -> None:
    """The gradient of a gradient."""
    raise RuntimeError(
        "crossdock: gradients of gradients are not supported; call backward or torch.autograd.grad without "
        "create_graph=True, or keep dispatch and combine out of the part that is differentiated twice"
    )


def save_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    pass


def is_observed(tensor: torch.Tensor) -> bool:
    """Whether anything observes operators: a compiler, a mode such as selective checkpointing, a transform of
    torch.func, a tensor subclass."""
    return torch.compiler.is_compiling() or _num_modes() > 0 or _are_transforms_active() or type(tensor) not in _PLAIN


def _is_in_transform() -> bool:
    return _are_transforms_active()


# Compilers trace inside the same transforms, and not all versions know the function of torch._C.
_is_in_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_transformed(inputs: Tuple) -> bool:
    """Whether a transform of torch.func is active or an input has a tangent. Operators would drop tangents silently."""
    if _is_in_transform():
        return True
    if forward_ad._current_level < 0:
        return False
    tensors = (given for given in inputs if isinstance(given, torch.Tensor))
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def transform_error() -> Exception:
    return RuntimeError(
        "crossdock does not support forward-mode derivatives or transforms of torch.func (jvp, grad, vjp, vmap and others); use "
        "backward or torch.autograd.grad, and keep dispatch, combine and experts out of what is transformed"
    )


def _raise(error: Exception, _: Any) -> NoReturn:
    raise error


def apply_of(function: Type[torch.autograd.Function]) -> Callable:
    """function.apply without its Python part, which only serves torch.func; that observes operators."""
    return super(torch.autograd.Function, function).apply if HAS_OPERATORS else function.apply


def eager_function(name: str, call: Callable, save: Callable, gradient: Callable) -> Callable:
    """The call with its gradient, as `define` describes them."""

    def forward(ctx, *inputs):
        output = call(*inputs)
        save(ctx, inputs, output)
        return output

    members = {"forward": staticmethod(forward), "backward": staticmethod(gradient)}
    apply = apply_of(type("crossdock_" + name, (torch.autograd.Function,), members))

    def eager(*inputs: Any) -> Any:
        return apply(*inputs) if torch.is_grad_enabled() else call(*inputs)

    return eager
