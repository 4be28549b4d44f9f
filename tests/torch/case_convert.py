"""Weights of transformers' models: their layers compute the same here, and files stay the same. Needs transformers 5."""
import importlib.util
import pathlib
import re
import shutil
import tempfile

import torch
import torch.distributed as dist
from cases import case, raises, random_of

from crossdock.torch import MoELayer
from crossdock.torch.convert import FAMILIES, TransformersFiles, from_transformers, to_transformers

E, K, D, F = 6, 2, 32, 24  # contiguous parts on 4 ranks: 2, 2, 1, 1
PREFIX, WORDS = "model.layers.1.", ("mlp", "block_sparse_moe")
PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
if not HAS_TRANSFORMERS and dist.get_rank() == 0:
    print("case_convert: cases skipped, transformers is not installed (tests/torch/requirements.txt)", flush=True)


def needs_transformers(*worlds):
    return case(*worlds) if HAS_TRANSFORMERS else lambda function: function


def model_of(family):
    """A small model with random weights, every one of them another."""
    from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    sizes = dict(hidden_size=D, num_hidden_layers=2, num_attention_heads=4, vocab_size=40, num_experts_per_tok=K)
    sizes.update(max_position_embeddings=64, head_dim=8, rope_scaling=None)
    of_deepseek = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
    of_deepseek.update(n_routed_experts=E, n_group=2, topk_group=1, n_shared_experts=2, first_k_dense_replace=0)
    made = {
        "qwen3_moe": lambda: Qwen3MoeConfig(**sizes, num_key_value_heads=2, num_experts=E, moe_intermediate_size=F),
        "mixtral": lambda: MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=E, intermediate_size=F),
        "deepseek_v3": lambda: DeepseekV3Config(
            **sizes, num_key_value_heads=4, moe_intermediate_size=F, routed_scaling_factor=2.5, **of_deepseek
        ),
        "gpt_oss": lambda: GptOssConfig(**sizes, num_key_value_heads=2, num_local_experts=E, intermediate_size=F),
    }
    config = made[family]()
    assert config.model_type == family
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    generator = random_of(5)
    with torch.no_grad():
        for tensor in [*model.parameters(), *(b for name, b in model.named_buffers() if "correction_bias" in name)]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * (0.3 if tensor.dim() > 1 else 0.5))
    return model


def normalises(model):
    return getattr(model.config, "norm_topk_prob", True)


def block_output(model, x):
    with torch.no_grad():
        out = model.model.layers[1].mlp(x[None])
    return (out[0] if isinstance(out, tuple) else out).reshape(x.shape)


def of_layer(tensors):
    return {name: t for name, t in tensors.items() if name.startswith(PREFIX) and any(word in name for word in WORDS)}


def same(got, wanted):
    assert got.keys() == wanted.keys(), (sorted(got), sorted(wanted))
    assert all(got[name].dtype == wanted[name].dtype and torch.equal(got[name], wanted[name]) for name in got)


def layer_output(family, state, x, model):
    """By a layer with the options of the family in docs/checkpoints.md."""
    options = {"normalise": normalises(model)}
    if family == "deepseek_v3":
        options = dict(score="sigmoid", scale=2.5, num_groups=2, group_top_k=1, group_score="top_2")
        options.update(expert_bias=True, shared_inner=2 * F)
    if family == "gpt_oss":
        options = dict(score="softmax_after_top_k", router_bias=True, bias=True)
        options.update(activation="clamped_swiglu", limit=model.config.swiglu_limit)
    layer = MoELayer(num_experts=E, top_k=K, width=D, inner=F, **options).eval()
    layer.load_state_dict(state)  # every name
    return layer(x).detach()


def close(got, wanted):
    difference = (got - wanted).abs().max() / wanted.abs().max()
    assert difference <= 2e-5, difference


@needs_transformers(1)
def layers_of_transformers_compute_the_same_here_and_keep_their_files(rank, world):
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            model = model_of(family)
            model.save_pretrained(folder, max_shard_size="40KB" if family == "qwen3_moe" else "1GB")
            with TransformersFiles(folder) as files:
                assert (len(files._files) > 1) == (family == "qwen3_moe")
                state = from_transformers(files, family, PREFIX)
                same(from_transformers(model.state_dict(), family, PREFIX), state)
                same(to_transformers(state, family, PREFIX), of_layer({name: files[name] for name in files}))
                for ids in ([4, 1], []):
                    part = from_transformers(files, family, PREFIX, experts=ids)
                    same(part, {n: t[ids] if n.startswith("experts.") else t for n, t in state.items()})
                    if ids and FAMILIES[family].projections:
                        given = to_transformers(part, family, PREFIX, experts=ids)
                        assert all(torch.equal(files[name], tensor) for name, tensor in given.items())
                        assert sum(".experts." in name for name in given) == 6
            same(to_transformers(state, family, PREFIX, form="memory"), of_layer(model.state_dict()))
            x = torch.randn((40, D), generator=random_of(2))
            wanted = block_output(model, x)
            close(layer_output(family, state, x, model), wanted)
            if family == "qwen3_moe":
                continue  # several files
            # Other weights, written as files: transformers loads them.
            changed = {name: tensor.flip(0) for name, tensor in state.items()}
            path = f"{folder}/model.safetensors"
            save_file({**load_file(path), **to_transformers(changed, family, PREFIX)}, path, metadata={"format": "pt"})
            again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
            close(block_output(again, x), layer_output(family, changed, x, model))


@needs_transformers(4)
def every_rank_reads_its_experts(rank, world):
    folder = tempfile.mkdtemp() if rank == 0 else None
    names = [folder]
    dist.broadcast_object_list(names)
    folder = pathlib.Path(names[0])
    x = torch.randn((40, D), generator=random_of(2))
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (snippet,) = [block for block in blocks if "transformers" in block]
    for family in ("qwen3_moe", "mixtral"):
        if rank == 0:
            model = model_of(family)
            model.save_pretrained(folder / family)
            torch.save((block_output(model, x), normalises(model)), folder / f"{family}.pt")
        dist.barrier()
        wanted, normalise = torch.load(folder / f"{family}.pt")
        for placement in (None, [e * 3 % world for e in range(E)]):
            layer = MoELayer(num_experts=E, top_k=K, width=D, inner=F, normalise=normalise, placement=placement)
            with TransformersFiles(folder / family) as files:
                state = from_transformers(files, family, PREFIX, experts=layer.dispatcher.local_experts)
                whole, whole_files = from_transformers(files, family, PREFIX), dict(files)
            if family == "qwen3_moe":
                names = {"layer": layer, "folder": folder / family}
                exec(snippet, names)
                assert len(names["made"]) == 1 + 3 * len(layer.dispatcher.local_experts)
                assert all(torch.equal(t, whole_files[n]) for n, t in names["made"].items())
            for given in (state, whole):
                layer.load_state_dict(given)
                close(layer(x[10 * rank : 10 * rank + 10]).detach(), wanted[10 * rank : 10 * rank + 10])
                with torch.no_grad():
                    layer.experts.w1.zero_()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)


@case(1)
def tensors_that_cannot_be_converted_are_explained(rank, world):
    gate, experts = "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts."
    with raises(ValueError, "family must be one of qwen3_moe, mixtral, deepseek_v3, gpt_oss", "'llama'"):
        from_transformers({}, "llama")
    with raises(ValueError, "there is no tensor model.layers.1.mlp.gate.weight", "check family and prefix", "such as x"):
        from_transformers({"x": torch.zeros(1)}, "qwen3_moe", PREFIX)
    blocks = {"mlp.router.weight": torch.zeros(E, D), "mlp.experts.gate_up_proj_blocks": torch.zeros(E, D)}
    with raises(ValueError, "there is no tensor mlp.experts.gate_up_proj", "quantised", "dequantised"):
        from_transformers(blocks, "gpt_oss")
    quantised = torch.zeros((F, D), dtype=torch.uint8)
    with raises(ValueError, "experts.0.gate_proj.weight must be fp64, fp32, bf16 or fp16, got torch.uint8", "quantised"):
        from_transformers({gate: torch.zeros(E, D), f"{experts}0.gate_proj.weight": quantised}, "deepseek_v3", PREFIX)
    state = {"router.weight": torch.zeros(E, D), "experts.w1": torch.zeros(2, 2 * F, D), "experts.w2": torch.zeros(2, D, F)}
    with raises(ValueError, "state must have 6 experts, got 2", "docs/checkpoints.md"):
        to_transformers(state, "qwen3_moe", form="memory", experts=[0, 1])
    with raises(ValueError, 'form must be "files" or "memory"', "'file'"):
        to_transformers(state, "qwen3_moe", form="file")
