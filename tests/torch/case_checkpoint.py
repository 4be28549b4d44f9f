"""torch.distributed.checkpoint: layers and their optimizers, saved and loaded on different numbers of ranks. Needs torch 2.6."""
import io
import pathlib
import re
import tempfile
from multiprocessing.reduction import ForkingPickler

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import case, raises
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from crossdock.torch import Checkpoint, GroupedExperts, MoELayer, number_experts
from crossdock.torch.expert_tensors import ExpertTensor

E, K, D, F = 10, 2, 8, 12  # contiguous parts on 4 ranks: 3, 3, 2, 2
SIZES = dict(num_experts=E, top_k=K, width=D, inner=F)
PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"


def shared_folder(rank):
    """A new folder of all ranks, and the object that removes it."""
    folder = tempfile.TemporaryDirectory() if rank == 0 else None
    names = [folder.name if folder else None]
    dist.broadcast_object_list(names)
    return names[0], folder


def scattered(world):
    """A placement in which no rank's experts are contiguous."""
    return [e * 3 % world for e in range(E)]


def trained(group=None, seed=3, steps=2, optimizer=torch.optim.AdamW, **options):
    """A layer and its optimizer, after steps whose gradients differ from expert to expert."""
    torch.manual_seed(seed)
    layer = MoELayer(group, **SIZES, **options)
    optimizer = optimizer(layer.parameters(), lr=0.1)
    for _ in range(steps):
        for parameter in layer.parameters():
            parameter.grad = parameter.detach() * 3
        optimizer.step()
    optimizer.zero_grad()
    return layer, optimizer


def values_of(layer, optimizer=None):
    """The router's and every expert's tensors by global number, with their moments."""
    found = {}
    for name, parameter in layer.named_parameters():
        state = optimizer.state.get(parameter, {}) if optimizer else {}
        for key, value in {"": parameter.detach(), **state}.items():
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            if name.startswith("experts.") and value.dim() > 0:
                found.update({(name, key, e): part for e, part in zip(layer.dispatcher.local_experts, value)})
            else:
                found[(name, key)] = value
    return found


def equals(got, wanted):
    return got.keys() == wanted.keys() and all(torch.equal(got[key], wanted[key]) for key in got)


def groups_of(world, sizes):
    """The groups of these sizes that this rank is in."""
    groups = [dist.new_group(list(range(i, min(i + n, world)))) for n in sizes for i in range(0, world, n)]
    return [group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER]


@case(2, 4)
def a_checkpoint_loads_on_any_number_of_ranks_and_back(rank, world):
    folder, owner = shared_folder(rank)
    dcp.save({"app": Checkpoint(*trained(placement=scattered(world)))}, checkpoint_id=f"{folder}/all")
    for group in groups_of(world, (1, 2, 3, 4)):
        size, first = dist.get_world_size(group), dist.get_process_group_ranks(group)[0]
        for placement in (None, scattered(size)):
            wanted = values_of(*trained(group, placement=placement))
            for steps in (0, 1):  # an optimizer that has no state yet, and one with another
                other = trained(group, seed=4, steps=steps, placement=placement)
                assert not equals(values_of(*other), wanted)
                dcp.load({"app": Checkpoint(*other)}, checkpoint_id=f"{folder}/all", process_group=group)
                assert equals(values_of(*other), wanted)
        dcp.save({"app": Checkpoint(*other)}, checkpoint_id=f"{folder}/{size}.{first}", process_group=group)
    dist.barrier()
    other = trained(seed=4)
    for name in {f"{size}.0" for size in (1, 2, 3, 4) if size <= world}:
        dcp.load({"app": Checkpoint(*other)}, checkpoint_id=f"{folder}/{name}")
        assert equals(values_of(*other), values_of(*trained()))
        with torch.no_grad():
            other[0].experts.w1.zero_()
    dist.barrier()
    del owner


@case(2, 4)
def a_state_dict_is_saved_as_it_is(rank, world):
    folder, owner = shared_folder(rank)
    layer, _ = trained()
    mine = dist.new_group([rank], use_local_synchronization=True)
    alone, wanted = MoELayer(mine, **SIZES), trained(mine)[0]  # all experts
    states = {
        "state_dict": layer.state_dict(),
        "copies": {name: value.clone() for name, value in layer.state_dict().items()},
        "model": torch.nn.Sequential(torch.nn.Linear(D, D), layer).state_dict(prefix="1."),
        "torch's function": get_model_state_dict(layer),
    }
    for name, state in states.items():
        for call in (dcp.save, dcp.async_save):
            path = f"{folder}/{name} {call.__name__}"
            done = call({"x": state}, checkpoint_id=path)
            done.result() if call is dcp.async_save else None
            found = alone.state_dict(prefix="1.1." if name == "model" else "")
            for tensor in found.values():
                tensor.zero_()
            dcp.load({"x": found}, checkpoint_id=path, process_group=mine)
            assert equals(values_of(alone), values_of(wanted)), path
    # A program that knows nothing of experts: one tensor [E, ...] per parameter.
    if rank == 0:
        dcp_to_torch_save(path, f"{folder}/whole.pt")
        whole = torch.load(f"{folder}/whole.pt", weights_only=True)["x"]
        assert whole["experts.w1"].shape == (E, 2 * F, D) and torch.equal(whole["experts.w1"], wanted.experts.w1)
    dist.barrier()
    other, _ = trained(seed=4)
    other.load_state_dict(torch.load(f"{folder}/whole.pt")["x"])  # each rank takes its experts
    assert equals(values_of(other), values_of(layer))
    dist.barrier()
    del owner


@case(1)
def experts_that_are_all_on_one_rank_need_nothing(rank, world):
    folder, owner = shared_folder(rank)
    layer, _ = trained()
    assert all(type(value) is torch.Tensor for value in layer.state_dict().values())
    dcp.save(layer.state_dict(), checkpoint_id=folder)
    other, _ = trained(seed=4)
    dcp.load(other.state_dict(), checkpoint_id=folder)
    assert equals(values_of(other), values_of(layer))
    dist.barrier()
    del owner


@case(2, 4)
def other_values_of_optimizers_follow_their_experts(rank, world):
    """Adafactor keeps sums of rows and columns. A value that cannot be split by expert is refused."""
    folder, owner = shared_folder(rank)
    layer, optimizer = trained(optimizer=torch.optim.Adafactor)
    wanted = values_of(layer, optimizer)
    dcp.save({"app": Checkpoint(layer, optimizer)}, checkpoint_id=folder)
    mine = dist.new_group([rank], use_local_synchronization=True)
    other = trained(mine, seed=4, optimizer=torch.optim.Adafactor)
    dcp.load({"app": Checkpoint(*other)}, checkpoint_id=folder, process_group=mine)
    found = values_of(*other)
    assert equals({key: found[key] for key in wanted}, wanted) and len(found) > len(wanted)
    optimizer.state[layer.experts.w1]["odd"] = torch.zeros(77)
    with raises(ValueError, "experts.w1.odd must have the shape of its parameter or one entry per expert", "(77,)"):
        Checkpoint(layer, optimizer).state_dict()
    dist.barrier()
    del owner


@case(4)
def experts_that_fsdp2_shards_are_saved_whole(rank, world):
    """Two ranks have the same experts, each a part of them: of their rows, or of the experts themselves."""
    from torch.distributed.fsdp import fully_shard

    folder, owner = shared_folder(rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
    mine = dist.new_group([rank], use_local_synchronization=True)

    def sharded(seed, dimension, steps=2):
        torch.manual_seed(seed)
        layer = MoELayer(mesh["ep"], **SIZES, placement=[e % 2 for e in range(E)])
        fully_shard(layer.experts, mesh=mesh["edp"], shard_placement_fn=lambda _: Shard(dimension))
        optimizer = torch.optim.AdamW([{"params": [layer.router.weight]}, {"params": layer.expert_parameters()}], lr=0.1)
        for _ in range(steps):
            for parameter in layer.parameters():
                parameter.grad = parameter.detach() * 3
            optimizer.step()
        optimizer.zero_grad()
        return layer, optimizer

    def alone(seed):
        torch.manual_seed(seed)
        layer = MoELayer(mine, **SIZES)
        optimizer = torch.optim.AdamW([{"params": [layer.router.weight]}, {"params": layer.expert_parameters()}], lr=0.1)
        for _ in range(2):
            for parameter in layer.parameters():
                parameter.grad = parameter.detach() * 3
            optimizer.step()
        optimizer.zero_grad()
        return layer, optimizer

    for dimension in (0, 1):
        path = f"{folder}/{dimension}"
        dcp.save({"app": Checkpoint(*sharded(3, dimension))}, checkpoint_id=path)
        other = alone(4)
        dcp.load({"app": Checkpoint(*other)}, checkpoint_id=path, process_group=mine)
        assert equals(values_of(*other), values_of(*alone(3)))
        for there, steps in ((1 - dimension, 0), (dimension, 1)):
            back = sharded(5, there, steps)
            dcp.load({"app": Checkpoint(*back)}, checkpoint_id=path)
            assert type(back[0].experts.w1).__name__ == "DTensor"
            assert equals(values_of(*back), values_of(*sharded(3, dimension)))
    layer = sharded(5, 0)[0]
    layer.load_state_dict(alone(3)[0].state_dict())  # of one rank, into shards
    assert equals(values_of(layer), values_of(sharded(3, 0)[0]))
    dist.barrier()
    del owner


@case(2)
def wrappers_do_not_change_names(rank, world):
    from torch.nn.parallel import DistributedDataParallel as DDP

    folder, owner = shared_folder(rank)
    mine = dist.new_group([rank], use_local_synchronization=True)
    for name in ("ddp", "compiled"):
        path, wrapped = f"{folder}/{name}", []
        for seed in (3, 4):
            layer, optimizer = trained(seed=seed)
            DDP._set_params_and_buffers_to_ignore_for_model(layer, ["experts.w1", "experts.w2"])
            wrapped.append((DDP(layer) if name == "ddp" else torch.compile(layer), optimizer, layer))
        dcp.save({"app": Checkpoint(*wrapped[0][:2])}, checkpoint_id=path)
        dcp.load({"app": Checkpoint(*wrapped[1][:2])}, checkpoint_id=path)
        assert equals(values_of(wrapped[1][2], wrapped[1][1]), values_of(*trained()))
        alone = trained(mine, seed=4)
        dcp.load({"app": Checkpoint(*alone)}, checkpoint_id=path, process_group=mine)
        assert equals(values_of(*alone), values_of(*trained(mine)))
    dist.barrier()
    del owner


@case(2)
def experts_without_a_number_of_all_are_refused(rank, world):
    folder, owner = shared_folder(rank)
    experts = GroupedExperts(2, D, F, expert_ids=[2 * rank, 2 * rank + 1])
    words = "how many there are in all is not known", "num_experts"
    for call in (dcp.save, dcp.load):
        with raises(dcp.CheckpointException, *words):
            if call is dcp.load and rank == 0:
                dcp.save({"w1": torch.zeros(2, 2 * F, D)}, checkpoint_id=folder, no_dist=True)
            dist.barrier()
            call({"w1": experts.state_dict()["w1"]}, checkpoint_id=folder)
    dist.barrier()
    del owner


@case(2)
def experts_of_your_own_can_be_numbered(rank, world):
    folder, owner = shared_folder(rank)

    def numbered(value):
        module = torch.nn.ModuleDict({"up": torch.nn.Module()})
        module["up"].weight = torch.nn.Parameter(torch.full((2, 3), float(value)))
        number_experts(module, [rank, rank + 2], 4)
        return module

    dcp.save(numbered(rank).state_dict(), checkpoint_id=folder)
    whole = {"up.weight": torch.full((4, 3), -1.0)}
    dcp.load(whole, checkpoint_id=folder)
    assert whole["up.weight"].tolist() == [[0.0] * 3, [1.0] * 3, [0.0] * 3, [1.0] * 3]
    other = numbered(7)
    other.load_state_dict({"up.weight": torch.arange(4.0)[:, None].expand(4, 3)})
    assert other["up"].weight[:, 0].tolist() == [rank, rank + 2]
    dist.barrier()
    del owner


@case(2)
def a_state_dict_of_other_experts_is_refused(rank, world):
    state = MoELayer(**SIZES).state_dict()
    other = MoELayer(**SIZES, placement=[e % 2 for e in range(E)])
    with raises(ValueError, "the state_dict holds experts", "but this rank has", "torch.distributed.checkpoint"):
        other.load_state_dict(state)


@case(4)
def tensors_of_experts_reach_other_processes_with_their_place(rank, world):
    """As torch's asynchronous checkpoints in a process of their own send them; torch.save writes plain tensors."""
    w1 = MoELayer(**SIZES, placement=scattered(world)).state_dict()["experts.w1"]
    sent = ForkingPickler.loads(ForkingPickler.dumps(w1))
    assert type(sent) is ExpertTensor and sent.place == w1.place and torch.equal(sent, w1)
    assert sent.size() == (E, 2 * F, D) and sent.size(0) == E and sent.shape[0] == len(w1.place.ids)
    assert str(list(w1.place.ids)) in repr(w1)
    memory = io.BytesIO()
    torch.save(w1, memory)
    memory.seek(0)
    assert type(torch.load(memory)) is torch.Tensor


@case(2, 4)
def the_page_about_checkpoints_does_what_it_says(rank, world):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    blocks = [block for block in blocks if "transformers" not in block]  # those are in case_convert
    assert len(blocks) == 3
    folder, owner = shared_folder(rank)
    names = dict(folder=f"{folder}/all", weights=f"{folder}/weights", data_parallel_size=world)

    def run(block, model, optimizer):
        names.update(model=model, optimizer=optimizer, loss=model(torch.ones(2, D)).square().sum())
        exec(block, names)

    first = trained()
    for count, block in enumerate(blocks[:2]):
        second = trained(seed=4)
        run(block, *first)  # saves, and loads the same
        run(re.sub(r"^dcp.save.*", "", block, flags=re.MULTILINE), *second)
        last = -count or None  # the second saves the model alone
        assert equals(values_of(*second[:last]), values_of(*trained()[:last]))
    before = {key: value.clone() for key, value in values_of(first[0]).items()}
    run(blocks[2], *first)
    assert names["norm"] > 0 and not any(torch.equal(value, before[key]) for key, value in values_of(first[0]).items())
    dist.barrier()
    del owner
