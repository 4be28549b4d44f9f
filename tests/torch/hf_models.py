"""Tiny random models of transformers, each with experts in every layer or most."""
import contextlib
import os
import shutil
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=24,
    moe_intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts_per_tok=2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
OTHERS = {
    "qwen3_moe": dict(num_experts=8, norm_topk_prob=True),
    "mixtral": dict(num_local_experts=8),
    "gpt_oss": dict(num_local_experts=8),
    "olmoe": dict(num_experts=8),
    "deepseek_v3": dict(
        n_routed_experts=8, n_group=2, topk_group=1, first_k_dense_replace=1, num_key_value_heads=4, kv_lora_rank=8, q_lora_rank=8,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    ),
}


def config_of(family):
    return AutoConfig.for_model(family, **{**SIZES, **OTHERS[family]})


def make(family, **options):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family), **options)
    with torch.no_grad():
        for parameter in model.parameters():  # the usual first values are too small to see experts in the outputs
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return model


@contextlib.contextmanager
def folder(family):
    """A folder that all ranks see, with a checkpoint, until all have left it."""
    rank = dist.get_rank()
    made = [tempfile.mkdtemp() if rank == 0 else None]
    if rank == 0:
        make(family).save_pretrained(f"{made[0]}/{family}")
    dist.broadcast_object_list(made)
    yield made[0]
    dist.barrier()
    if rank == 0:
        shutil.rmtree(made[0])


def load(family, path, dtype=torch.float32, **options):
    return AutoModelForCausalLM.from_pretrained(f"{path}/{family}", dtype=dtype, **options)
