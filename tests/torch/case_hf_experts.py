"""Experts of transformers on one rank: every experts class of the installed version against its own eager forward."""
import gc
import pathlib
import re
import sys
import unittest.mock
import warnings
import weakref

import hf_experts
import hf_models
import torch
import transformers
from cases import case, raises
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils.parametrize import register_parametrization
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import crossdock.transformers
from crossdock.transformers import dispatchers, experts
from crossdock.transformers.forms import form_of, parameters_of, refusal_of
from crossdock.transformers.local_dispatch import row_limit
from crossdock.torch.library_experts import Form

E, K, D, F, LIMIT = hf_experts.E, hf_experts.K, hf_experts.D, hf_experts.F, hf_experts.LIMIT
PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "transformers.md"

REGISTRIES = [ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS]
try:
    from transformers.distributed.expert_parallel import EPImplementationInterface
except ImportError:
    pass  # 5.20
else:
    REGISTRIES.append(EPImplementationInterface())

assert not any("crossdock" in names for names in REGISTRIES), "importing crossdock.transformers must change nothing"
with warnings.catch_warnings(record=True) as at_registration:
    warnings.simplefilter("always")
    crossdock.transformers.register()
IS_NEWEST = not at_registration  # the version of the table


def make_exotic(seed=0):
    """Experts with a gate that the library does not have."""
    module = hf_experts.make_experts(hf_experts.classes_of("gpt_oss")[0], "crossdock", seed=seed)
    module.alpha = 1.5
    return module


def all_classes():
    return [kind for folder in hf_experts.folders() for kind in hf_experts.classes_of(folder)]


def quick_classes():
    return [kind for folder in hf_experts.QUICK for kind in hf_experts.classes_of(folder)]


def description(module):
    form = form_of(module)
    if isinstance(form, str):
        return "falls back: " + form
    extras = [("interleaved", form.interleaved), ("transposed", form.transposed), ("biases", module.has_bias)]
    extras.append(("norm", module.has_post_expert_norm))
    text = ", ".join([form.activation, *(name for name, is_there in extras if is_there)])
    return text + ("; falls back on GPUs" if form.transposed else "")


def check(experts_class):
    """Tokens and one token, then none."""
    module = hf_experts.make_experts(experts_class)
    for tokens in (9, 1, 0):
        inputs = hf_experts.inputs_of(module, tokens)
        got = hf_experts.results_of(module, *inputs, "crossdock")
        if tokens > 0:
            difference, name = hf_experts.largest_difference(got, hf_experts.results_of(module, *inputs, "eager"))
            assert difference <= 2e-5, f"{experts_class.__name__}: {name} differs by {difference:.1e}"
        else:
            assert got["out"].shape == inputs[0].shape
    return module


@case(1)
def one_sentence_says_what_a_version_lacks(rank, world):
    """5.20 has the interface of experts, 5.23 also that of expert parallelism."""
    texts = [str(warning.message) for warning in at_registration]
    if transformers.__version__.startswith("5.20."):
        assert len(texts) == 1 and "has no EPImplementationInterface (5.23 has)" in texts[0], texts
    else:
        assert not texts, texts
    assert len(REGISTRIES) == 3 - len(texts) and all("crossdock" in names for names in REGISTRIES)
    with unittest.mock.patch.dict(sys.modules, {"transformers.integrations.moe": None}):
        with raises(ImportError, f"transformers {transformers.__version__} has no ExpertsInterface", "install 5.20 or later"):
            crossdock.transformers.register()


@case(1)
def ten_families_equal_eager(rank, world):
    found = {description(check(kind)) for kind in quick_classes()}
    assert found >= {
        *("swiglu", "limited_swiglu", "geglu_tanh", "squared_relu", "swiglu, norm"),
        *(f"clamped_swiglu, {layout}transposed, biases; falls back on GPUs" for layout in ("", "interleaved, ")),
    }, found
    if IS_NEWEST:
        assert len(hf_experts.QUICK) == 10 and "falls back: its gate is none that the library has" in found, found


@case(1)
def half_precision_differs_no_more_than_grouped_mm(rank, world):
    for kind in all_classes():
        exact = hf_experts.make_experts(kind)
        module = hf_experts.make_experts(kind, dtype=torch.bfloat16)
        exact.load_state_dict({name: value.float() for name, value in module.state_dict().items()})
        x, ids, weights = hf_experts.inputs_of(module, 40, torch.bfloat16)
        wide = [tensor.detach().float().requires_grad_() for tensor in (x, weights)]
        wanted = hf_experts.results_of(exact, wide[0], ids, wide[1], "eager")
        errors = {}
        for implementation in ("crossdock", "grouped_mm"):
            got = hf_experts.results_of(module, x, ids, weights, implementation)
            assert all(value.dtype == torch.bfloat16 for value in got.values())
            got = {name: value.float() for name, value in got.items()}
            errors[implementation] = hf_experts.largest_difference(got, wanted)[0]
        assert errors["crossdock"] <= 1.25 * errors["grouped_mm"], (kind, errors)


@case(1)
def experts_of_other_ranks_are_left_out(rank, world):
    """Ids of num_experts and above, as other implementations of expert parallelism pass them; more routes than experts."""
    for kind in quick_classes():
        module = hf_experts.make_experts(kind)
        x, ids, weights = hf_experts.inputs_of(module, 9)
        wanted = hf_experts.results_of(module, x, ids, (weights * (ids < 2)).detach().requires_grad_(), "eager")
        for name, parameter in list(module.named_parameters()):
            if parameter.shape[0] == E:
                setattr(module, name, torch.nn.Parameter(parameter.detach()[:2].clone()))
                wanted[name] = wanted[name][:2]
        module.num_experts, module._is_expert_parallel = 2, True
        masked = (weights.detach() * (ids < 2)).requires_grad_()
        got = hf_experts.results_of(module, x, ids.clamp(max=2), masked, "crossdock")
        wanted["weights"] = wanted["weights"] * (ids < 2)
        difference, name = hf_experts.largest_difference(got, wanted)
        assert difference <= 2e-5, f"{kind.__name__}: {name} differs by {difference:.1e}"


@case(1)
def the_eager_forward_of_three_families_refuses_experts_of_other_ranks(rank, world):
    """If this fails, transformers has been repaired: docs/transformers.md says that it fails."""
    for folder in ("gpt_oss", "nemotron_h", "openai_privacy_filter"):
        module = hf_experts.make_experts(hf_experts.classes_of(folder)[0])
        x, ids, weights = hf_experts.inputs_of(module, 9)
        with raises((RuntimeError, IndexError), ""):
            module(x, ids.masked_fill(ids == 0, E), weights)


class LowRank(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.reads = 0
        self.a = torch.nn.Parameter(torch.randn(weight.shape[0], weight.shape[1], 2) * 0.3)
        self.b = torch.nn.Parameter(torch.randn(weight.shape[0], 2, weight.shape[2]) * 0.3)

    def forward(self, weight):
        self.reads += 1
        return weight + self.a @ self.b


@case(1)
def adapters_of_expert_parameters_are_trained(rank, world):
    """A parametrization of a parameter that is frozen. The parameter is computed once per forward."""
    module = hf_experts.make_experts(hf_experts.classes_of("qwen3_moe")[0])
    for name in ("gate_up_proj", "down_proj"):
        getattr(module, name).requires_grad_(False)
        register_parametrization(module, name, LowRank(getattr(module, name)))
    x, ids, weights = hf_experts.inputs_of(module, 9)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    assert len(trained) == 4 and isinstance(form_of(module), Form)
    results = []
    for implementation in ("crossdock", "eager"):
        module.config._experts_implementation = implementation
        adapters = [adapter for adapter in module.modules() if isinstance(adapter, LowRank)]
        for adapter in adapters:
            adapter.reads = 0
        out = module(x, ids, weights)
        assert implementation == "eager" or [adapter.reads for adapter in adapters] == [1, 1]
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, weights, *trained])])
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5 * max(1.0, want.abs().max().item()))


@case(1)
def low_rank_adapters_of_peft_train_like_eager(rank, world):
    """On the experts' parameters of a model, which peft wraps while a forward runs."""
    if not IS_NEWEST:
        return  # peft is as new
    import peft

    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    ids = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(0))
    results = []
    for implementation in ("crossdock", "eager"):
        model = hf_models.make("qwen3_moe", experts_implementation=implementation)
        adapters = peft.LoraConfig(r=2, target_modules=[], target_parameters=names, init_lora_weights=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = peft.get_peft_model(model, adapters)
            loss = model(input_ids=ids, labels=ids).loss
        assert not any("crossdock" in str(warning.message) for warning in caught)
        loss.backward()
        results.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    got, wanted = results
    assert len(wanted) == 8 and all("experts" in name for name in wanted), list(wanted)
    scale = max(grad.abs().max() for grad in wanted.values())
    for name, grad in wanted.items():
        assert (got[name] - grad).abs().max() <= 2e-5 * scale, name


@case(1)
def parameters_are_read_in_place(rank, world):
    """No copy of the parameters, transposed and interleaved ones among them."""
    from crossdock.torch import library_experts

    module = hf_experts.make_experts(hf_experts.classes_of("gpt_oss")[0], "crossdock")
    seen = []
    original = library_experts._views
    library_experts._views = lambda parameters: seen.append([p.data_ptr() for p in parameters]) or original(parameters)
    try:
        hf_experts.results_of(module, *hf_experts.inputs_of(module, 9), "crossdock")
    finally:
        library_experts._views = original
    names = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    assert len(seen) == 2 and all(pointers == [getattr(module, name).data_ptr() for name in names] for pointers in seen)


@case(1)
def a_fallback_warns_once_and_says_why(rank, world):
    experts._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in (0, 1):
            module = make_exotic(seed)
            module(*hf_experts.inputs_of(module, 3))
        quantised = hf_experts.make_experts(hf_experts.classes_of("mixtral")[0], "crossdock")
        quantised.gate_up_proj = torch.nn.Parameter(quantised.gate_up_proj.to(torch.float8_e4m3fn), requires_grad=False)
        with raises(Exception, ""):  # neither can grouped_mm multiply these
            quantised(*hf_experts.inputs_of(quantised, 3))
    texts = [str(warning.message) for warning in caught if "crossdock" in str(warning.message)]
    assert len(texts) == 2 and "GptOssExperts: its gate is none that the library has" in texts[0], texts
    assert "MixtralExperts: its parameters are quantised" in texts[1], texts


@case(1)
def tensor_subclasses_fall_back(rank, world):
    """torchao's tensors and DTensor are such."""
    experts._warned.clear()
    plain = hf_experts.make_experts(hf_experts.classes_of("mixtral")[0])
    x, ids, weights = hf_experts.inputs_of(plain, 9)
    wanted = plain(x, ids, weights)
    module = hf_experts.double(hf_experts.make_experts(type(plain), "crossdock"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.testing.assert_close(module(x, ids, weights), wanted, rtol=2e-5, atol=2e-5)
    (text,) = [str(warning.message) for warning in caught if "crossdock" in str(warning.message)]
    assert "MixtralExperts: its parameters are of type Doubled" in text, text
    mesh = init_device_mesh("cpu", (1,))
    module.gate_up_proj = torch.nn.Parameter(distribute_tensor(plain.gate_up_proj.detach(), mesh, [Shard(0)]))
    assert "of type DTensor" in refusal_of(module, parameters_of(module), x)


@case(1)
def fp8_experts_warn_once_and_run(rank, world):
    """transformers' fp8 classes look in a registry of their own."""
    experts._warned.clear()
    model = hf_models.make("qwen3_moe", experts_implementation="crossdock")
    module, plain = hf_experts.make_fp8_experts(model)
    x, ids, weights = hf_experts.inputs_of(plain, 9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            torch.testing.assert_close(module(x, ids, weights), plain(x, ids, weights), rtol=2e-5, atol=2e-5)
    (text,) = [str(warning.message) for warning in caught if "crossdock" in str(warning.message)]
    assert "FP8Experts: its parameters are quantised" in text, text


@case(1)
def a_gate_that_the_library_has_is_found_whatever_its_class(rank, world):
    class Subclass(hf_experts.classes_of("mixtral")[0]):
        def _apply_gate(self, gate_up):
            gate, up = gate_up.chunk(2, dim=-1)
            return torch.nn.functional.gelu(gate) * up

    module = hf_experts.make_experts(hf_experts.classes_of("mixtral")[0])
    assert form_of(module) == Form()
    module = hf_experts.make_experts(hf_experts.classes_of("mixtral")[0])
    module.__class__ = Subclass
    assert form_of(module) == Form("geglu")
    assert form_of(make_exotic()) == "its gate is none that the library has"


@case(1)
def compilers_fail_in_grouped_mm_of_5_20(rank, world):
    """For fp32 and transposed parameters, as docs/transformers.md says; later versions are repaired."""
    torch._dynamo.reset()
    module = hf_experts.make_experts(hf_experts.classes_of("gpt_oss")[0], "grouped_mm")
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    inputs = hf_experts.inputs_of(module, 9)
    if transformers.__version__.startswith("5.20."):
        with raises(Exception, ""):
            compiled(*inputs)
    else:
        compiled(*inputs)


@case(1)
def compilers_keep_one_graph(rank, world):
    classes = [hf_experts.classes_of(folder)[0] for folder in ("gpt_oss", "muse_spark")]
    modules = [hf_experts.make_experts(kind, "crossdock") for kind in classes]
    if IS_NEWEST:  # a fallback; 5.20's own function for fp32 fails in compilers
        modules.append(make_exotic())
    experts._warned.clear()
    for module in modules:
        torch._dynamo.reset()
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        for tokens in (9, 4, 7):
            x, ids, weights = inputs = hf_experts.inputs_of(module, tokens)
            got, want = compiled(*inputs), hf_experts.results_of(module, *inputs, "eager")
            module.config._experts_implementation = "crossdock"
            torch.testing.assert_close(got, want["out"], rtol=2e-5, atol=2e-5)
            grads = torch.autograd.grad(got.square().sum(), (x, weights, module.down_proj))
            for a, b in zip(grads, torch.autograd.grad(module(*inputs).square().sum(), (x, weights, module.down_proj))):
                torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    assert len(experts._warned) == len(modules) - 2  # while it was compiled


@case(1)
def compilers_do_not_compile_again_for_each_number_of_tokens(rank, world):
    """T becomes a symbol; what depends on it, as a row limit on a GPU, is found when the compiled code runs."""
    torch._dynamo.reset()
    module = hf_experts.make_experts(hf_experts.classes_of("qwen3_moe")[0], "crossdock")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for tokens in (9, 4, 17, 100):
        inputs = hf_experts.inputs_of(module, tokens)
        torch.testing.assert_close(compiled(*inputs), module(*inputs), rtol=2e-5, atol=2e-5)
    assert len(graphs) == 2, len(graphs)  # one for 9 tokens, one for any number


@case(1)
def autocast_computes_in_its_dtype(rank, world):
    module = hf_experts.make_experts(hf_experts.classes_of("qwen3_moe")[0], "crossdock")
    x, ids, weights = hf_experts.inputs_of(module, 9)
    exact = hf_experts.results_of(module, x, ids, weights, "eager")["out"]
    module.config._experts_implementation = "crossdock"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(x, ids, weights)
    out.sum().backward()
    assert out.dtype == x.dtype and module.down_proj.grad.dtype == torch.float32
    difference = (out - exact).abs().max() / exact.abs().max()
    assert 1e-5 < difference < 3e-2, difference


@case(1)
def a_row_limit_for_gpus_covers_all_routes(rank, world):
    for routes in (0, 1, 15, 16, 17, 1000, 65536, 70001):
        assert max(routes, 1) <= row_limit(routes) <= max(routes * 9 / 8, 16), (routes, row_limit(routes))


@case(1)
def models_generate_and_train_like_eager(rank, world):
    for family in hf_models.OTHERS:
        eager, ours = (hf_models.make(family, experts_implementation=name) for name in ("eager", "crossdock"))
        ids = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(0))
        for model in (eager, ours):
            model(input_ids=ids, labels=ids).loss.backward()
        for (name, a), b in zip(ours.named_parameters(), eager.parameters()):
            scale = max(p.grad.abs().max() for p in eager.parameters())
            assert (a.grad - b.grad).abs().max() <= 2e-5 * scale, f"{family}: {name}"
        options = dict(max_new_tokens=6, do_sample=False, eos_token_id=None)
        assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options)), family


@case(1)
def all_classes_equal_eager_and_are_in_the_table(rank, world):
    text = PAGE.read_text()
    counts = f"{len(all_classes())} classes in {len(hf_experts.folders())} folders"
    assert not IS_NEWEST or counts in text, f"docs/transformers.md must have: {counts}"
    table = text.split("| class | runs as |")[1].split("\n\n")[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|$", table, re.MULTILINE))
    for kind in all_classes():
        text = description(check(kind))
        assert listed.pop(kind.__name__, None) == text, f"docs/transformers.md must have | `{kind.__name__}` | {text} |"
    assert not (listed and IS_NEWEST), f"docs/transformers.md lists classes that transformers lacks: {sorted(listed)}"


@case(1)
def dispatchers_go_with_their_group(rank, world):
    (ranks,) = crossdock.Group.from_threads(1)
    sizes = dict(num_experts=4, top_k=2, width=8)
    assert dispatchers.dispatcher_of(ranks, **sizes) == dispatchers.dispatcher_of(ranks, **sizes)
    alive = weakref.ref(ranks)
    del ranks
    gc.collect()
    assert alive() is None
