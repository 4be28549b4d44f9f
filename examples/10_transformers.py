"""Fine-tunes a tiny random Qwen3-MoE with transformers' Trainer. Its experts are spread over 4 ranks.

    torchrun --nproc-per-node 4 examples/10_transformers.py
"""
import gc
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Trainer, TrainingArguments, logging, set_seed
from transformers.distributed import DistributedConfig

import crossdock.transformers as ct

VOCABULARY, LENGTH = 64, 16


class Counting(torch.utils.data.Dataset):
    """Sequences that count upwards from random numbers, in steps of 1 to 4."""

    def __len__(self):
        return 2048

    def __getitem__(self, index):
        start, step = index % VOCABULARY, index // VOCABULARY % 4 + 1
        ids = (start + step * torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": ids, "labels": ids}


def make_checkpoint(folder):
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def main(folder):
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    set_seed(0)
    if dist.get_rank() == 0:
        make_checkpoint(folder)
    dist.barrier()

    ct.register()
    parallel = DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="crossdock")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=parallel)

    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        max_steps=40,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Counting())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if dist.get_rank() == 0:
        print("loss", *(f"{float(loss):.3f}" for loss in losses))


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    main(shared[0])
    gc.collect()  # the model holds process groups; see docs/pytorch.md
    dist.barrier()
    dist.destroy_process_group()
