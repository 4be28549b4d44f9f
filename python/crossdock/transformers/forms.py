"""Which of the library's experts an experts module of transformers is."""
import math
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import torch
import torch.nn.functional as functional

from crossdock.torch.library_experts import Form

from .tracing import evaluated_while_tracing

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_GPU_DTYPES = (torch.bfloat16, torch.float16)  # for others torch's products are at least as fast
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)  # subclasses, such as those of torchao and DTensor, hold values elsewhere

_PLAIN: Dict[str, Callable] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda h: functional.gelu(h, approximate="tanh"),
    "squared_relu": lambda h: functional.relu(h).square(),
}


def _clamped(gate: torch.Tensor, linear: torch.Tensor, limit: float) -> torch.Tensor:
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(1.702 * gate) * (linear.clamp(-limit, limit) + 1)


_GATED: Dict[str, Callable] = {
    "swiglu": lambda gate, linear, _: functional.silu(gate) * linear,
    "geglu": lambda gate, linear, _: functional.gelu(gate) * linear,
    "geglu_tanh": lambda gate, linear, _: functional.gelu(gate, approximate="tanh") * linear,
    "clamped_swiglu": _clamped,
    "limited_swiglu": lambda gate, linear, limit: functional.silu(gate.clamp(max=limit)) * linear.clamp(-limit, limit),
}


Parameters = Tuple[Any, Any, Any, Any]  # w1, w2 and the biases or None


def parameters_of(module: Any) -> Parameters:
    """As the module has them. Once per forward: adapters compute a parameter each time that it is read."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    names = (up, "down_proj", *((up + "_bias", "down_proj_bias") if module.has_bias else ()))
    found = [getattr(module, name, None) for name in names]
    return (*found, *(None,) * (4 - len(found)))  # type: ignore[return-value]


@evaluated_while_tracing
def form_of(module: Any) -> Union[Form, str]:
    """The form of the library's experts that computes the same, or why there is none. Found once per module, by its results:
    classes may override `_apply_gate`, and `act_fn` may be anything."""
    found = module.__dict__.get("_crossdock_form")
    if found is None:
        found = module.__dict__["_crossdock_form"] = _find_form(module)
    return found


def refusal_of(module: Any, parameters: Parameters, tokens: torch.Tensor) -> Optional[str]:
    """Why the library cannot compute these tokens with the module's parameters; None: it can."""
    w1, w2, b1, b2 = parameters
    if w1 is None or w2 is None:
        return "it has no fused parameters"
    form = form_of(module)
    if isinstance(form, str):
        return form
    given = [p for p in (w1, w2, b1, b2) if p is not None]
    special = [type(p).__name__ for p in given if type(p) not in _PLAIN_TYPES]
    if special:
        return f"its parameters are of type {special[0]}, whose values the library cannot read"
    if any(p.dtype not in DTYPES or p.dtype != w1.dtype for p in given):
        return "its parameters are quantised, or differ in dtype"
    if w1.dim() != 3 or w2.dim() != 3 or w1.shape[0] != w2.shape[0]:
        return f"its parameters have the shapes {list(w1.shape)} and {list(w2.shape)}"
    if not tokens.is_cuda and tokens.device.type != "cpu":
        return f"its tokens are on a device of type {tokens.device.type}"
    if tokens.is_cuda and computing_dtype(tokens, w1) not in _GPU_DTYPES:
        return "on a GPU the library's experts compute in bf16 and fp16"
    if tokens.is_cuda and form.transposed:
        return "on a GPU the library does not read transposed parameters"
    return None


def computing_dtype(tokens: torch.Tensor, w1: torch.Tensor) -> torch.dtype:
    kind = tokens.device.type
    if torch.is_autocast_enabled(kind) and w1.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return w1.dtype


def _find_form(module: Any) -> Union[Form, str]:
    limits = _limits_of(module)
    if module.has_gate:
        activation, limit = _gate_of(module, limits)
    else:
        activation, limit = _activation_of(module), 7.0
    if activation is None:
        return "its gate is none that the library has" if module.has_gate else "its activation is none that the library has"
    interleaved = module.has_gate and not module.is_concatenated
    return Form(activation, limit, interleaved, bool(module.is_transposed))


def _limits_of(module: Any) -> List[float]:
    values = (value for name, value in vars(module).items() if "limit" in name and isinstance(value, (int, float)))
    return [float(value) for value in values if value > 0 and math.isfinite(value)]


def _probes(limits: List[float]) -> torch.Tensor:
    values = [-12.0, -6.3, -2.5, -1.1, -0.4, 0.0, 0.2, 0.9, 1.7, 3.1, 8.2, 15.0]
    values += [sign * factor * limit for limit in limits for factor in (0.9, 1.4) for sign in (-1, 1)]
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _gate_of(module: Any, limits: List[float]) -> Tuple[Optional[str], float]:
    values = _probes(limits)
    gate, linear = (part.reshape(-1) for part in torch.meshgrid(values, values, indexing="ij"))
    rows = torch.cat([gate, linear]) if module.is_concatenated else torch.stack([gate, linear], dim=1).reshape(-1)
    got = _result_of(lambda: module._apply_gate(rows[None])[0])
    for limit in [*limits, 7.0]:
        for name, function in _GATED.items():
            if _is_close(got, function(gate, linear, limit)):
                return name, limit
    return None, 0.0


def _activation_of(module: Any) -> Optional[str]:
    values = _probes([])
    got = _result_of(lambda: module.act_fn(values[None])[0])
    return next((name for name, function in _PLAIN.items() if _is_close(got, function(values))), None)


def _result_of(function: Callable) -> Optional[torch.Tensor]:
    try:
        with torch.no_grad():
            return function().double()
    except Exception:  # it takes something else, or has parameters elsewhere
        return None


def _is_close(got: Optional[torch.Tensor], wanted: torch.Tensor) -> bool:
    return got is not None and got.shape == wanted.shape and torch.allclose(got, wanted, rtol=1e-6, atol=1e-6)
