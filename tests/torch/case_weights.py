"""The first values of a layer, and its state_dict."""
import copy
import io

import torch
from cases import case, raises

import crossdock
from crossdock.torch import GroupedExperts, MoELayer
from crossdock.torch.expert_tensors import ExpertTensor

E, K, D, F = 6, 2, 8, 12
SIZES = dict(num_experts=E, top_k=K, width=D, inner=F)


def alone():
    (group,) = crossdock.Group.from_threads(1)
    return group


def equals_part_of(layer, whole):
    """Whether the layer has the router and its experts of `whole`, which has all."""
    own = layer.dispatcher.local_experts
    pairs = [(layer.router.weight, whole.router.weight)]
    pairs += [(getattr(layer.experts, name), getattr(whole.experts, name)[own]) for name in ("w1", "w2")]
    return all(torch.equal(mine, wanted) for mine, wanted in pairs)


@case(1, 2, 4)
def weights_do_not_depend_on_the_number_of_ranks(rank, world):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for placement in (None, [e * 5 % world for e in range(E)]):
            torch.manual_seed(5)
            layers = [MoELayer(**SIZES, dtype=dtype, placement=placement) for _ in range(2)]
            behind = torch.rand(3)
            torch.manual_seed(5)
            wholes = [MoELayer(alone(), **SIZES, dtype=dtype) for _ in range(2)]
            assert torch.equal(behind, torch.rand(3)), "torch's generators are out of step"
            for layer, whole in zip(layers, wholes):
                assert equals_part_of(layer, whole), (dtype, placement)
            for name in ("w1", "w2"):
                experts = torch.cat([getattr(whole.experts, name) for whole in wholes]).flatten(1)
                assert experts.unique(dim=0).shape[0] == 2 * E, f"experts have the same {name}"
                limit = experts.shape[1] / (2 * F if name == "w1" else D)
                assert 0.9 < experts.abs().max() * limit**0.5 <= 1.01 and experts.mean().abs() < 0.1 / limit**0.5


@case(1, 2)
def a_layer_without_memory_gets_its_weights_later(rank, world):
    torch.manual_seed(5)
    whole = MoELayer(alone(), **SIZES)
    torch.manual_seed(5)
    layer = MoELayer(**SIZES, device="meta")
    assert layer.experts.w1.is_meta
    layer.to_empty(device="cpu")
    for module in (layer.router, layer.experts):
        module.reset_parameters()
    assert equals_part_of(layer, whole)


@case(1)
def every_expert_needs_its_number(rank, world):
    for wrong in ([], [0], [0, 1, 2]):
        with raises(ValueError, "expert_ids must have 2 entries"):
            GroupedExperts(2, D, F, expert_ids=wrong)


@case(1, 4)
def the_state_dict_can_be_saved_and_loaded_by_every_rank(rank, world):
    torch.manual_seed(rank)
    layer, other, third = (MoELayer(**SIZES) for _ in range(3))
    state = layer.state_dict()
    assert (type(state["experts.w1"]) is ExpertTensor) == (world > 1)
    memory = io.BytesIO()
    torch.save(state, memory)
    memory.seek(0)
    loaded = torch.load(memory)
    assert all(type(value) is torch.Tensor for value in loaded.values())
    other.load_state_dict(loaded)
    third.load_state_dict(state)
    for name, value in layer.named_parameters():
        assert torch.equal(loaded[name], value)
        for twin in (other, third):
            assert torch.equal(twin.get_parameter(name), value) and type(twin.get_parameter(name)) is torch.nn.Parameter
    third.experts.w1.data.zero_()
    assert loaded["experts.w1"].any() and layer.experts.w1.any()


@case(4)
def copies_of_a_state_dict_stay_marked_and_results_do_not(rank, world):
    layer = MoELayer(**SIZES)
    w1 = layer.state_dict()["experts.w1"]
    assert w1.data_ptr() == layer.experts.w1.data_ptr()
    for twin in (copy.deepcopy(w1), w1.clone(), w1.detach(), w1.cpu(), w1.to(torch.float64), w1.half()):
        assert type(twin) is ExpertTensor and (twin - w1).abs().max() < 1e-3
    assert type(w1 * 2) is type(w1.sum()) is type(torch.zeros_like(w1)) is torch.Tensor
    with torch.no_grad():
        w1.mul_(0)
    assert not layer.experts.w1.any()
