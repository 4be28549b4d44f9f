"""The experts classes of the installed transformers, made tiny."""
import copy
import importlib
import inspect
import os
import pathlib

os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
import transformers  # noqa: E402
from torch.utils._pytree import tree_map  # noqa: E402
from transformers.integrations import finegrained_fp8  # noqa: E402

E, K, D, F, LIMIT = 8, 3, 16, 24, 0.5  # values beyond the limit are common

def folders():
    """The model folders whose code uses the interface of experts."""
    models = pathlib.Path(transformers.__file__).parent / "models"
    files = sorted(models.glob("*/modeling_*.py"))
    return list(dict.fromkeys(file.parent.name for file in files if "\n@use_experts_implementation" in file.read_text()))


def classes_of(folder):
    models = pathlib.Path(transformers.__file__).parent / "models"
    found = []
    for file in sorted((models / folder).glob("modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{folder}.{file.stem}")
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == module.__name__ and hasattr(value, "_apply_gate"):
                found.append(value)
    return found


class TinyConfig:
    """The defaults of a model's configuration with small sizes, whatever their names."""

    def __init__(self, experts_class, implementation):
        self._experts_implementation = implementation
        self._defaults = []
        package = experts_class.__module__.rpartition(".")[0]
        name = experts_class.__module__.rpartition(".")[2].replace("modeling_", "configuration_")
        module = importlib.import_module(f"{package}.{name}")
        for value in vars(module).values():  # those of encoders come last
            if inspect.isclass(value) and issubclass(value, transformers.PretrainedConfig) and value.__module__ == module.__name__:
                self._defaults.append(value())
        self._defaults.sort(key=lambda config: not any("num" in key and "experts" in key for key in vars(config)))

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if "expert" in name and "size" not in name and "dim" not in name:
            return E
        if "limit" in name:
            return LIMIT
        if "inter" in name or "ffn" in name:
            return F
        if "size" in name or "dim" in name:
            return D
        for defaults in self._defaults:
            value = getattr(defaults, name, None)
            if value is not None and not isinstance(value, (dict, list)):
                return value
        raise AttributeError(name)


def make_experts(experts_class, implementation="eager", dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    module = experts_class(TinyConfig(experts_class, implementation))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(0, 0.3 if parameter.dim() == 3 else 0.5)
            if "norm" in name:
                parameter.add_(1)
    return module.to(dtype)


def inputs_of(module, tokens, dtype=torch.float32, seed=1):
    """Tokens, ids and weights; one expert has no token."""
    generator = torch.Generator().manual_seed(seed)
    width = (module.down_proj.shape[2] if module.is_transposed else module.down_proj.shape[1])
    x = torch.randn((tokens, width), generator=generator)
    ids = torch.rand((tokens, E - 1), generator=generator).argsort(dim=1)[:, :K].contiguous()
    weights = torch.rand((tokens, K), generator=generator)
    device = module.down_proj.device
    return x.to(device, dtype).requires_grad_(), ids.to(device), weights.to(device, dtype).requires_grad_()


def results_of(module, x, ids, weights, implementation):
    """The output, and the gradients of tokens, weights and every parameter."""
    module.config._experts_implementation = implementation
    out = module(x, ids, weights)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    named = dict(module.named_parameters())
    grads = torch.autograd.grad(out, [x, weights, *named.values()], direction, allow_unused=True)
    return {"out": out.detach(), **dict(zip(("x", "weights", *named), grads))}


def largest_difference(got, wanted):
    """The largest difference, relative to the largest value of its kind, at least 1, and its name."""
    worst = (0.0, "")
    for name, want in wanted.items():
        if want is None:
            assert got[name] is None or not got[name].any(), name
            continue
        difference = (got[name] - want).abs().max().item() / max(want.abs().max().item(), 1.0) if want.numel() else 0.0
        assert got[name].shape == want.shape and got[name].dtype == want.dtype, name
        worst = max(worst, (difference, name))
    return worst


class Doubled(torch.Tensor):
    """A tensor subclass as quantisers make them: its values are not in memory of its own."""

    @staticmethod
    def __new__(cls, half):
        return torch.Tensor._make_wrapper_subclass(cls, half.shape, dtype=half.dtype)

    def __init__(self, half):
        self.half = half

    @classmethod
    def __torch_dispatch__(cls, function, types, inputs=(), options=None):
        if function is torch.ops.aten.detach.default:
            return cls(inputs[0].half)
        inputs, options = tree_map(lambda value: 2 * value.half if isinstance(value, cls) else value, (inputs, options or {}))
        return function(*inputs, **options)


def double(module):
    """The module with the same values in Doubled parameters."""
    for name in ("gate_up_proj", "down_proj"):
        half = getattr(module, name).detach() / 2
        setattr(module, name, torch.nn.Parameter(Doubled(half), requires_grad=False))
    return module


BLOCK = 8  # of fp8 weights


def make_fp8_experts(model):
    """The experts of a layer after transformers has put its fp8 classes into the model, with values; and plain experts with the
    same values. Products of fp8, for which transformers needs a GPU, are replaced."""
    plain = copy.deepcopy(model.model.layers[0].mlp.experts)
    quantisation = transformers.FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK))
    finegrained_fp8.replace_with_fp8_linear(model, quantization_config=quantisation)
    module = model.model.layers[0].mlp.experts.to_empty(device="cpu")
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            weight, scale = getattr(module, name), getattr(module, name + "_scale_inv")
            weight.copy_(torch.randn(weight.shape))
            scale.uniform_(0.1, 0.3)
            getattr(plain, name).copy_(values_of_fp8(weight, scale))
    plain.config = copy.copy(plain.config)
    plain.config._experts_implementation = "eager"
    finegrained_fp8._FINEGRAINED_FP8 = finegrained_fp8.FineGrainedFP8(None, None, fp8_products)
    return module, plain


def values_of_fp8(weight, scale):
    return weight.float() * scale.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)


def fp8_products(rows, weight, scale, *_, offsets, **__):
    starts = [0, *offsets.tolist()]
    made = [rows[a:b] @ w.t() for a, b, w in zip(starts, starts[1:], values_of_fp8(weight, scale).to(rows.dtype))]
    return torch.cat(made)


FAMILIES = (
    *("mixtral", "qwen3_moe", "deepseek_v3", "deepseek_v4", "gpt_oss"),
    *("gemma4", "nemotron_h", "muse_spark", "openai_privacy_filter", "inkling2"),
)
QUICK = [folder for folder in FAMILIES if folder in folders()]
