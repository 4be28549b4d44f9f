"""The experts classes of the installed transformers, made tiny."""
import importlib
import inspect
import os
import pathlib

os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
import transformers  # noqa: E402

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
    x = torch.randn((tokens, width), generator=generator).to(dtype).requires_grad_()
    ids = torch.rand((tokens, E - 1), generator=generator).argsort(dim=1)[:, :K].contiguous()
    weights = torch.rand((tokens, K), generator=generator).to(dtype).requires_grad_()
    return x, ids, weights


def results_of(module, x, ids, weights, implementation):
    """The output, and the gradients of tokens, weights and every parameter."""
    module.config._experts_implementation = implementation
    out = module(x, ids, weights)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
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


FAMILIES = (
    *("mixtral", "qwen3_moe", "deepseek_v3", "deepseek_v4", "gpt_oss"),
    *("gemma4", "nemotron_h", "muse_spark", "openai_privacy_filter", "inkling2"),
)
QUICK = [folder for folder in FAMILIES if folder in folders()]
