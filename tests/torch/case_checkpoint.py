"""torch.distributed.checkpoint: what docs/pytorch.md recommends, and what is refused. Needs torch 2.6."""
import pathlib
import re
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import case, raises, random_of, same_everywhere
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from crossdock.torch import MoELayer

E, K, D, F = 6, 2, 8, 12
SIZES = dict(num_experts=E, top_k=K, width=D, inner=F)
DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "pytorch.md"


def from_docs(name):
    """A function of docs/pytorch.md."""
    blocks = re.findall(r"^```python\n(.*?)^```", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    (code,) = [block for block in blocks if f"def {name}(" in block]
    names = {}
    exec(code, names)
    return names[name]


def shared_folder(rank):
    """A new folder of all ranks, and the object that removes it."""
    folder = tempfile.TemporaryDirectory() if rank == 0 else None
    names = [folder.name if folder else None]
    dist.broadcast_object_list(names)
    return names[0], folder


def trained(group=None, seed=3, steps=2):
    """A layer and its optimizer, after steps whose gradients differ from expert to expert."""
    torch.manual_seed(seed)
    layer = MoELayer(group, **SIZES)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    for _ in range(steps):
        for parameter in layer.parameters():
            parameter.grad = parameter.detach() * 3
        optimizer.step()
    return layer, optimizer


def values_of(layer, optimizer):
    """The router's and every expert's tensors by global number, with their moments."""
    found = {}
    for name, parameter in layer.named_parameters():
        for key, value in {"": parameter.detach(), **optimizer.state[parameter]}.items():
            if name.startswith("experts.") and value.dim() > 0:
                found.update({(name, key, e): part for e, part in zip(layer.dispatcher.local_experts, value)})
            else:
                found[(name, key)] = value
    return found


def equals(got, wanted):
    return got.keys() == wanted.keys() and all(torch.equal(got[key], wanted[key]) for key in got)


@case(2, 4)
def the_recipe_saves_and_loads_on_any_number_of_ranks(rank, world):
    by_expert = from_docs("by_expert")
    folder, owner = shared_folder(rank)
    layer, optimizer = trained()
    dcp.save(by_expert(layer, optimizer), checkpoint_id=folder)
    groups = [dist.new_group(list(range(i, min(i + size, world)))) for size in (1, 2, 3, 4) for i in range(0, world, size)]
    for group in groups:
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            continue
        wanted = values_of(*trained(group))
        other = trained(group, seed=4, steps=1)
        assert not equals(values_of(*other), wanted)
        dcp.load(by_expert(*other), checkpoint_id=folder, process_group=group)
        assert equals(values_of(*other), wanted)
    dist.barrier()
    del owner


@case(2, 4)
def a_state_dict_with_one_name_for_different_experts_is_refused(rank, world):
    folder, owner = shared_folder(rank)
    layer, _ = trained()
    states = {
        "state_dict": layer.state_dict(),
        "copies": {name: value.clone() for name, value in layer.state_dict().items()},
        "of a model": torch.nn.Sequential(torch.nn.Linear(D, D), layer).state_dict(),
        "of torch's function": get_model_state_dict(layer),
        "nested": {"model": layer.state_dict()},
    }
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    for name, state in states.items():
        for call in (dcp.save, dcp.async_save):
            with raises(dcp.CheckpointException, "every rank has other experts under the same names", "docs/pytorch.md"):
                done = call(state, checkpoint_id=f"{folder}/{name}")
                done.result() if call is dcp.async_save else None
    # Written by one rank, as by programs that know nothing of experts.
    if rank == 0:
        dcp.save({name: value * 2 for name, value in layer.state_dict().items()}, checkpoint_id=folder, no_dist=True)
    dist.barrier()
    with raises(dcp.CheckpointException, "every rank has other experts under the same names"):
        dcp.load(layer.state_dict(), checkpoint_id=folder)
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters()))
    dist.barrier()
    del owner


@case(1)
def experts_that_are_all_on_one_rank_can_be_saved_as_they_are(rank, world):
    folder, owner = shared_folder(rank)
    layer, _ = trained()
    dcp.save(layer.state_dict(), checkpoint_id=folder)
    other, _ = trained(seed=4)
    dcp.load(other.state_dict(), checkpoint_id=folder)
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), other.parameters()))
    del owner


@case(1, 2, 4)
def clipping_scales_all_gradients_by_one_factor(rank, world):
    clip = from_docs("clip_gradients")
    wanted = trained(dist.new_group([rank], use_local_synchronization=True))[0]  # all experts
    layer, _ = trained()
    for model in (layer, wanted):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 3
    norm = torch.nn.utils.clip_grad_norm_(wanted.parameters(), 0.5)
    torch.testing.assert_close(clip(layer, layer.expert_parameters(), 0.5), norm)
    own = layer.dispatcher.local_experts
    torch.testing.assert_close(layer.router.weight.grad, wanted.router.weight.grad)
    torch.testing.assert_close(layer.experts.w1.grad, wanted.experts.w1.grad[own])
    torch.testing.assert_close(layer.experts.w2.grad, wanted.experts.w2.grad[own])
    for parameter in layer.parameters():  # small gradients stay as they are
        parameter.grad.fill_(1e-6)
    clip(layer, layer.expert_parameters(), 0.5)
    assert all(parameter.grad.eq(1e-6).all() for parameter in layer.parameters())
