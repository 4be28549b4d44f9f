"""The library's whole layer as a differentiable operator: `torch.ops.crossdock.moe_layer`."""
import weakref
from typing import Any, Dict, List, NamedTuple, Tuple

import torch

import crossdock

from . import kept
from .calls import Core, core_of
from .library_experts import gradient_memory, is_captured, stream_of
from .registration import define, refuse_gradient, save_nothing
from .tensors import contiguous, empty, view_of, weights_dtype

_layers: "weakref.WeakKeyDictionary[Core, Dict[Tuple, crossdock.Layer]]" = weakref.WeakKeyDictionary()


class Router(NamedTuple):
    """The part of the layer's configuration that is not the dispatcher's."""

    score: str
    normalise: bool
    scale: float


def _layer_of(core: Core, router: Router, inner: int, dtype: torch.dtype) -> crossdock.Layer:
    layers = _layers.setdefault(core, {})
    key = (router, inner, dtype)
    if key not in layers:
        sizes = {name: core.config[name] for name in ("num_experts", "top_k", "width")}
        layers[key] = crossdock.Layer(
            core.group,
            **sizes,
            inner=inner,
            dtype=dtype,
            router={"score": router.score, "normalise": router.normalise, "scaling": router.scale},
            dispatch={name: value for name, value in core.config.items() if name not in sizes},
            allow_equal_tokens=True,
        )
    return layers[key]


class _Call:
    """The layer and the inputs of a call, contiguous. The lock of the core is held while it is used."""

    def __init__(self, core: Core, router: Router, x, gate, w1, w2):
        self.core = core
        self.tensors = x, gate, w1, w2 = [contiguous(tensor) for tensor in (x, gate, w1, w2)]
        self.x = view_of(x)
        self.weights = crossdock.LayerWeights(view_of(gate), crossdock.ExpertWeights(view_of(w1), view_of(w2)))
        self.layer = _layer_of(core, router, w2.shape[2], x.dtype)
        if x.is_cuda:
            self.layer.set_stream(stream_of(x))

    def forward(self, keep: bool) -> Tuple[torch.Tensor, Any]:
        """Out [T, D] and the values for backward."""
        x = self.tensors[0]
        out, memory = empty(x, x.shape)
        saved = self.layer.forward(self.x, self.weights, out=memory, save=keep).saved
        if keep and is_captured(x):
            self.core.captured.append(saved)
        return out, saved


def _layer(
    x: torch.Tensor,
    gate: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    dispatcher: int,
    score: str,
    normalise: bool,
    scale: float,
    keep: bool,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """x [T, D] -> out [T, D] and, if `keep`, values for backward. gate [E, D]; w1 and w2 as in GroupedExperts."""
    core = core_of(dispatcher)
    with core.lock:
        out, saved = _Call(core, Router(score, normalise, scale), x, gate, w1, w2).forward(keep)
    return out, kept.tensor_of(saved) if keep else kept.like_kept()


def _layer_backward(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    saved: torch.Tensor,
    dispatcher: int,
    score: str,
    normalise: bool,
    scale: float,
    wanted: List[bool],
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """grad_out [T, D] -> the gradients of x, gate, w1 and w2; gradients that are not wanted are empty."""
    core, grad_out = core_of(dispatcher), contiguous(grad_out)
    with core.lock:
        call = _Call(core, Router(score, normalise, scale), x, gate, w1, w2)
        values = kept.take(saved)
        if values is None:  # the graph is used a second time, on all ranks
            values = call.forward(True)[1]
        grad_gate, memory_gate = gradient_memory(gate, wanted[0], weights_dtype(x.dtype))
        (grad_w1, memory_w1), (grad_w2, memory_w2) = map(gradient_memory, (w1, w2), wanted[1:])
        outputs = crossdock.LayerGradients(memory_gate, crossdock.ExpertWeights(memory_w1, memory_w2))
        grad_x, memory = empty(call.tensors[0], x.shape)
        call.layer.backward(call.x, call.weights, view_of(grad_out), values, outputs, grad_x=memory)
    return grad_x, grad_gate.to(gate.dtype), grad_w1.to(w1.dtype), grad_w2.to(w2.dtype)


def _fake_layer(x, gate, w1, w2, dispatcher, score, normalise, scale, keep):
    return x.new_empty(x.shape), kept.like_kept()


def _fake_backward(grad_out, x, gate, w1, w2, saved, dispatcher, score, normalise, scale, wanted):
    parameters = (p.new_empty(p.shape if want else (0,)) for p, want in zip((gate, w1, w2), wanted))
    return (x.new_empty(x.shape), *parameters)


def _save(ctx: Any, inputs: Tuple, output: Tuple) -> None:
    ctx.save_for_backward(*inputs[:4], output[1])
    ctx.options = inputs[4:8]


def _gradient(ctx: Any, grad_out: torch.Tensor, _: Any) -> Tuple:
    wanted = list(ctx.needs_input_grad[1:4])
    grad_x, *grads = moe_layer_backward(grad_out, *ctx.saved_tensors, *ctx.options, wanted)
    return (grad_x, *(grad if want else None for grad, want in zip(grads, wanted)), None, None, None, None, None)


moe_layer = define(
    "moe_layer",
    "(Tensor x, Tensor gate, Tensor w1, Tensor w2, int dispatcher, str score, bool normalise, float scale, bool keep)"
    " -> (Tensor, Tensor)",
    _layer,
    _fake_layer,
    _save,
    _gradient,
    refuse=lambda error, inputs: core_of(inputs[4]).refuse(error),
)
moe_layer_backward = define(
    "moe_layer_backward",
    "(Tensor grad_out, Tensor x, Tensor gate, Tensor w1, Tensor w2, Tensor saved, int dispatcher, str score,"
    " bool normalise, float scale, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor)",
    _layer_backward,
    _fake_backward,
    save_nothing,
    refuse_gradient,
    refuse=lambda error, inputs: core_of(inputs[6]).refuse(error),
)
