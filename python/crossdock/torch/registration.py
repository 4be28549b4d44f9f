"""Differentiable operators, `torch.ops.crossdock.*`.

With torch 2.4 and later they are operators with fake versions, so torch.compile keeps the graph whole and selective
checkpointing can name them. In eager mode, and with older versions, they are autograd functions.
"""
from typing import Any, Callable, Optional, Type

import torch

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
        if operator is not None and is_observed(inputs[0]):
            return operator(*inputs)
        return eager(*inputs)

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
