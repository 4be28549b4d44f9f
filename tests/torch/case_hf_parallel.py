"""Expert parallelism in transformers against one rank. Needs transformers 5.23."""
import copy
import os
import warnings

import hf_experts
import hf_models
import torch
import torch.distributed as dist
from accelerate import Accelerator
from cases import case, error_of, raises, random_of
from hf_parallel import check_module, part_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

import crossdock.transformers
from crossdock.transformers import experts
from crossdock.transformers.expert_parallel import CrossdockEP

crossdock.transformers.register()

E = hf_experts.E
LAYOUTS = {  # (tp, fsdp, ep)
    2: [(1, 2, 2), (2, 1, 2)],
    4: [(1, 4, 4), (1, 4, 2), (2, 2, 4), (2, 2, 2)],
}


# ---- One experts module ----


@case(2, 4)
def experts_modules_equal_one_rank(rank, world):
    for folder in hf_experts.QUICK:
        for tp in (1, 2, world):
            check_module(hf_experts.classes_of(folder)[0], rank, world, tp)
        check_module(hf_experts.classes_of(folder)[0], rank, world, 2, torch.bfloat16)


@case(2)
def a_rank_without_tokens_and_rows_takes_part(rank, world):
    """Its parameters get zero gradients, which FSDP2 reduces. Rank 1 has neither tokens nor rows."""
    for folder in ("mixtral", "gpt_oss", "inkling2"):
        whole = hf_experts.make_experts(hf_experts.classes_of(folder)[0])
        part, mesh = part_of(whole, rank, world), init_device_mesh("cpu", (world, 1), mesh_dim_names=("ep", "tp"))
        x, ids, weights = hf_experts.inputs_of(whole, 9 if rank == 0 else 0)
        ids = ids[:, :1] % (E // world)
        out = CrossdockEP(part, mesh["ep"], mesh["tp"])(x, ids, weights[:, :1])
        out.sum().backward()
        assert out.shape == x.shape == x.grad.shape
        for name, parameter in part.named_parameters():
            assert parameter.grad is not None and bool(parameter.grad.any()) == (rank == 0), f"{folder}: {name}"


@case(2)
def what_the_library_cannot_compute_computes_itself(rank, world):
    """fp8 experts, and parameters that are tensor subclasses: one warning each, and the products of transformers."""
    experts._warned.clear()
    fp8, plain = hf_experts.make_fp8_experts(hf_models.make("qwen3_moe", experts_implementation="crossdock"))
    mixtral = hf_experts.classes_of("mixtral")[0]
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("ep", "tp"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for module, whole in ((fp8, plain), (hf_experts.make_experts(mixtral), hf_experts.make_experts(mixtral))):
            x, ids, weights = hf_experts.inputs_of(whole, 9, seed=rank)
            part = part_of(module, rank, world)
            if module is not fp8:
                part = hf_experts.double(part)
            out = CrossdockEP(part, mesh["ep"], mesh["tp"])(x, ids, weights)
            torch.testing.assert_close(out, whole(x, ids, weights), rtol=2e-5, atol=2e-5)
            got, wanted = (torch.autograd.grad(each.square().sum(), x)[0] for each in (out, whole(x, ids, weights)))
            torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)
    texts = [str(warning.message) for warning in caught if "crossdock" in str(warning.message)]
    assert len(texts) == 2 and "FP8Experts" in texts[0] and "Doubled" in texts[1], texts


@case(2)
def rows_after_those_of_the_last_expert_are_ignored(rank, world):
    """With max_rows on a GPU row tensors have such rows, with any values, and the experts' own forward may get them."""
    for folder in hf_experts.QUICK:
        part = part_of(hf_experts.make_experts(hf_experts.classes_of(folder)[0]), rank, world)
        mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("ep", "tp"))
        implementation = CrossdockEP(part, mesh["ep"], mesh["tp"])
        counts = torch.tensor([2, 0, 3, 1])
        x = hf_experts.inputs_of(part, 9)[0].detach()
        whole = torch.cat([x[:6], torch.full_like(x[6:], float("nan"))]).requires_grad_()
        exact = x[:6].clone().requires_grad_()
        results = []
        for rows in (whole, exact):
            out = implementation._by_their_own_forward(rows, counts)
            grads = torch.autograd.grad(out.square().sum(), [rows, *part.parameters()])
            results.append([out[:6], grads[0][:6], *grads[1:]])
            assert not out[6:].any() and not grads[0][6:].any()
        for got, want in zip(*results):
            torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@case(2, 4)
def ranks_that_share_tokens_must_have_the_same(rank, world):
    """Or almost the same: replicated layers may round differently. Ranks of other batches learn of it."""
    whole = hf_experts.make_experts(hf_experts.classes_of("mixtral")[0])
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("fsdp", "tp"))
    implementation = CrossdockEP(part_of(whole, rank, world), init_device_mesh("cpu", (world,)), mesh["tp"])
    is_wrong = rank == 1
    for tokens, text in ((9 - is_wrong, "has 8 tokens, rank 0 has 9"), (9, "has other tokens than rank 0")):
        error = error_of(lambda: implementation(*hf_experts.inputs_of(whole, tokens, seed=int(is_wrong))))
        assert f"rank 1 of the ranks that share tokens (tensor parallelism) {text}" in str(error), error
        assert "ranks [0, 1] of the job" in str(error), error
    x, ids, weights = hf_experts.inputs_of(whole, 9)
    wanted = whole(x, ids, weights)
    torch.testing.assert_close(implementation(x * (1 + 1e-6 * rank), ids, weights), wanted, rtol=2e-5, atol=2e-5)


@case(2)
def options_reach_the_dispatcher(rank, world):
    kind = hf_experts.classes_of("mixtral")[0]
    whole, mesh = hf_experts.make_experts(kind), init_device_mesh("cpu", (world, 1), mesh_dim_names=("ep", "tp"))
    inputs = hf_experts.inputs_of(whole, 9, seed=rank)
    try:
        crossdock.transformers.register(strategy="allgather", max_rows=1)
        implementation = CrossdockEP(part_of(whole, rank, world), *(mesh[dim] for dim in mesh.mesh_dim_names))
        error = error_of(lambda: implementation(*inputs))
        assert "max_rows" in str(error), error
    finally:
        crossdock.transformers.register()
    with raises(TypeError, "patience"):
        crossdock.transformers.register(patience=3)


@case(2)
def partial_sums_change_rounding_only(rank, world):
    whole = hf_experts.make_experts(hf_experts.classes_of("mixtral")[0])
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("ep", "tp"))
    x, ids, weights = hf_experts.inputs_of(whole, 40, seed=rank)
    want = torch.autograd.grad(whole(x, ids, weights).square().sum(), [x, weights])
    for partial_sums in (True, "rows"):
        try:
            crossdock.transformers.register(partial_sums=partial_sums)
            implementation = CrossdockEP(part_of(whole, rank, world), mesh["ep"], mesh["tp"])
        finally:
            crossdock.transformers.register()
        got = torch.autograd.grad(implementation(x, ids, weights).square().sum(), [x, weights])
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5 * b.abs().max().item())
        made = vars(implementation.group)["_dispatchers_of_transformers"]
        assert any(dict(names).get("partial_sums") == partial_sums for names in made), list(made)


# ---- Models ----


def batch_of(batch, step, rows=2, length=12):
    return torch.randint(3, hf_models.SIZES["vocab_size"], (rows, length), generator=random_of(batch, 100 + step))


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def load_both(family, path, layout):
    """The model with eager experts on this rank alone, and the model of all ranks."""
    tp, fsdp, ep = layout
    parallel = DistributedConfig(tp_size=tp, fsdp_size=fsdp, ep_size=ep, ep_implementation="crossdock")
    one = hf_models.load(family, path, experts_implementation="eager")
    local = {"experts_implementation": "crossdock"} if ep == 1 else {}
    return one, hf_models.load(family, path, distributed_config=parallel, **local)


def check_training(family, rank, world, layout, steps, path, prepare=lambda model: None):
    tp, fsdp, ep = layout
    models = one, many = load_both(family, path, layout)
    prepare(many)
    many.train()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9) for model in models]
    own = rank // tp
    for step in range(steps):
        batches = [batch_of(batch, step) for batch in range(fsdp)]
        wanted = one(input_ids=torch.cat(batches), labels=torch.cat(batches))
        got = many(input_ids=batches[own], labels=batches[own])
        limit = 2e-5 if step == 0 else 1e-3  # differences grow in training
        torch.testing.assert_close(full(got.logits), wanted.logits[2 * own : 2 * own + 2], rtol=limit, atol=limit)
        for optimizer, loss in zip(optimizers, (wanted.loss, got.loss)):
            optimizer.zero_grad()
            loss.backward()
        mean = full(got.loss.detach()).clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / world, wanted.loss.detach(), rtol=5e-5, atol=0)
        halves_are_split = tp > 1 and ep == 1 and family != "gpt_oss"  # of gates and linear values
        if step == 0 and halves_are_split:  # torch 2.11 cannot gather them: docs/transformers.md
            with raises(ValueError, "_StridedShard"):
                gradients_are_equal(one, many)
        elif step == 0:
            gradients_are_equal(one, many)
        for optimizer in optimizers:
            optimizer.step()


def gradients_are_equal(one, many):
    gradients = {name.replace("_orig_mod.", ""): full(parameter.grad) for name, parameter in many.named_parameters()}
    largest = max(parameter.grad.abs().max() for parameter in one.parameters())
    for name, parameter in one.named_parameters():
        difference = (gradients[name] - parameter.grad).abs().max() / largest
        assert difference < 2e-5, f"the gradient of {name} differs by {difference:.1e}"


@case(2, 4)
def training_equals_one_rank(rank, world):
    with hf_models.folder("qwen3_moe") as path:
        for layout in LAYOUTS[world]:
            check_training("qwen3_moe", rank, world, layout, 20, path)


@case(2)
def fsdp_and_tensor_parallelism_work_without_expert_parallelism(rank, world):
    for family in ("qwen3_moe", "gpt_oss"):
        with hf_models.folder(family) as path:
            for layout in ((1, 2, 1), (2, 1, 1)):
                check_training(family, rank, world, layout, 3, path)


@case(2)
def other_families_train_like_one_rank(rank, world):
    """Transposed parameters with biases, and groups of experts with a shared one."""
    for family in ("gpt_oss", "deepseek_v3"):
        with hf_models.folder(family) as path:
            for layout in LAYOUTS[world]:
                check_training(family, rank, world, layout, 3, path)


@case(2)
def checkpointing_and_compilers_keep_the_results(rank, world):
    with hf_models.folder("qwen3_moe") as path:
        for layout in LAYOUTS[world]:
            check_training("qwen3_moe", rank, world, layout, 2, path, lambda model: model.gradient_checkpointing_enable())
        for layout in LAYOUTS[world]:
            torch._dynamo.reset()
            check_training("qwen3_moe", rank, world, layout, 2, path, lambda model: model.compile(backend="aot_eager"))


@case(2, 4)
def generated_tokens_equal_those_of_one_rank(rank, world):
    with hf_models.folder("qwen3_moe") as path:
        for layout in LAYOUTS[world]:
            one, many = load_both("qwen3_moe", path, layout)
            own = batch_of(rank // layout[0], 0, rows=3, length=5)
            options = dict(max_new_tokens=6, do_sample=False, eos_token_id=None)
            assert torch.equal(many.generate(own, **options), one.generate(own, **options)), layout


@case(2)
def accelerate_trains_like_one_rank(rank, world):
    """With DDP, and experts of each rank's own tokens."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    accelerator = Accelerator(cpu=True)
    one, many = (hf_models.make("qwen3_moe", experts_implementation=name) for name in ("eager", "crossdock"))
    many, optimizer = accelerator.prepare(many, torch.optim.SGD(many.parameters(), lr=0.1))
    assert isinstance(many, torch.nn.parallel.DistributedDataParallel)
    batches = [batch_of(batch, 0) for batch in range(world)]
    one(input_ids=torch.cat(batches), labels=torch.cat(batches)).loss.backward()
    accelerator.backward(many(input_ids=batches[rank], labels=batches[rank]).loss)
    gradients_are_equal(one, many.module)
    optimizer.step()


@case(2)
def accelerate_does_not_wrap_models_with_expert_parallelism(rank, world):
    """As Trainer uses it: such models reduce their gradients themselves."""
    accelerator = Accelerator(cpu=True)
    with hf_models.folder("qwen3_moe") as path:
        one, many = load_both("qwen3_moe", path, (1, 2, 2))
    many = accelerator.prepare_model(many.train(), device_placement=False, evaluation_mode=True)
    optimizer = accelerator.prepare(torch.optim.SGD(many.parameters(), lr=0.1))
    batches = [batch_of(batch, 0) for batch in range(world)]
    one(input_ids=torch.cat(batches), labels=torch.cat(batches)).loss.backward()
    accelerator.backward(many(input_ids=batches[rank], labels=batches[rank]).loss)
    gradients_are_equal(one, many)
    optimizer.step()
