"""GroupedExperts and MoELayer against dense ones."""
import copy
import math
import pickle

import torch
import torch.distributed as dist
from cases import case, error_of, raises, random_of, same_everywhere, tokens_of

from crossdock.torch import GroupedExperts, MoELayer
from crossdock.torch.layer import best_experts
from crossdock.torch.library_experts import Form, expert_mlp
from crossdock.torch.whole_layer import whole_layer

E, K, D, F = 6, 2, 8, 12


def expert(x, w1, w2):
    gate, linear = (x @ w1.t()).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * linear) @ w2.t()


@case(1)
def grouped_experts_equal_single_ones(rank, world):
    """One expert has no rows; the last rows belong to no expert."""
    torch.manual_seed(0)
    experts = GroupedExperts(3, D, F, dtype=torch.float64)
    rows = torch.randn((9, D), dtype=torch.float64).requires_grad_()
    y = experts(rows, torch.tensor([4, 0, 3]))
    segments = zip(rows.split([4, 0, 3, 2])[:3], experts.w1, experts.w2)
    want = torch.cat([expert(*segment) for segment in segments] + [torch.zeros(2, D, dtype=torch.float64)])
    torch.testing.assert_close(y, want)
    inputs = (rows, experts.w1, experts.w2)
    for a, b in zip(torch.autograd.grad(y.square().sum(), inputs), torch.autograd.grad(want.square().sum(), inputs)):
        assert a.is_contiguous()
        torch.testing.assert_close(a, b)


@case(1)
def grouped_experts_may_have_no_rows(rank, world):
    experts = GroupedExperts(2, D, F)
    rows = torch.zeros((0, D)).requires_grad_()
    y = experts(rows, torch.tensor([0, 0]))
    y.sum().backward()
    assert y.shape == rows.grad.shape == (0, D)
    assert not experts.w1.grad.any() and not experts.w2.grad.any()


@case(1, 4)
def the_layer_equals_a_dense_one(rank, world):
    for score in ("softmax", "sigmoid"):
        torch.manual_seed(rank)
        layer = MoELayer(num_experts=E, top_k=K, width=D, inner=F, score=score, scale=1.5, dtype=torch.float64)
        everyone = [None] * world
        dist.all_gather_object(everyone, (layer.experts.w1.tolist(), layer.experts.w2.tolist()))
        w1, w2 = (torch.cat([torch.tensor(ranks[i], dtype=torch.float64) for ranks in everyone]) for i in (0, 1))
        x = torch.randn((1, tokens_of(rank, world), D), generator=random_of(rank), dtype=torch.float64).requires_grad_()
        logits = layer.router(x[0])
        scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
        weights, ids = scores.topk(K)
        weights = weights / weights.sum(1, keepdim=True) * 1.5
        dense = torch.stack([expert(x[0], w1[e], w2[e]) for e in range(E)], dim=1)  # [T, E, D]
        want = (dense.gather(1, ids[:, :, None].expand(-1, -1, D)) * weights[:, :, None]).sum(1)[None]
        got = layer(x)
        assert got.shape == x.shape
        torch.testing.assert_close(got, want)
        inputs = (x, layer.router.weight)
        for a, b in zip(torch.autograd.grad(got.sum(), inputs), torch.autograd.grad(want.sum(), inputs)):
            torch.testing.assert_close(a, b)


@case(1)
def the_layer_passes_a_gradient_check(rank, world):
    torch.manual_seed(0)
    layer = MoELayer(num_experts=E, top_k=K, width=D, inner=F, dtype=torch.float64)
    x = torch.randn((4, D), dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, _: layer(x), (x, layer.router.weight))


@case(1)
def equal_scores_go_to_the_lower_expert(rank, world):
    layer = MoELayer(num_experts=64, top_k=8, width=D, inner=F)
    expert_ids, weights = layer.route(torch.zeros(2, D))  # e.g. padding
    assert expert_ids.tolist() == [list(range(8))] * 2 and expert_ids.is_contiguous()
    assert torch.equal(weights, torch.full((2, 8), 1 / 8))


def sorted_experts(scores):
    """[T, E] -> [T, E]: the best first, NaN last; equal scores go to the lower id."""

    def best_first(row):
        return sorted(range(len(row)), key=lambda e: (1, 0, e) if math.isnan(row[e]) else (0, -row[e], e))

    return torch.tensor([best_first(row) for row in scores.tolist()])


@case(1)
def experts_are_those_of_a_stable_sort(rank, world):
    inf, nan = float("inf"), float("nan")
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 90.0, -104.0, inf, -inf, nan, -nan])
    counts = (1, 2, 8, 10, 12)  # ties, then infinite values, then NaN
    chosen = [special[torch.randint(0, count, (40, 64), generator=random_of(count))] for count in counts]
    logits = torch.cat([*chosen, torch.randn(200, 64, generator=random_of(0)), torch.full((1, 64), nan)])
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        wide = logits.to(dtype).to(torch.float64 if dtype == torch.float64 else torch.float32)
        for scores in (wide.softmax(-1), wide.sigmoid()):
            wanted = sorted_experts(scores)
            for top_k in (1, 8, 63, 64):
                assert torch.equal(best_experts(scores, top_k), wanted[:, :top_k]), (dtype, top_k)
    assert best_experts(torch.zeros(0, 4), 2).shape == (0, 2)


@case(2)
def tokens_of_another_shape_are_the_same_error_on_every_rank(rank, world):
    layer = MoELayer(num_experts=E, top_k=K, width=D, inner=F)
    x = torch.randn(3, D, generator=random_of(rank))
    for wrong in (torch.randn(3, D + 1), torch.randn(D - 1), torch.tensor(1.0), [1.0] * D, None):
        error = error_of(lambda wrong=wrong: layer(wrong if rank == 1 else x))
        same_everywhere(str(error))
        assert error.culprit == 1 and f"x must be a tensor [..., {D}], got" in str(error), error
    assert layer(x[0]).shape == (D,)


@case(2)
def tokens_of_another_dtype_are_the_same_error_on_every_rank(rank, world):
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    for dtype in dtypes:
        layer = MoELayer(num_experts=E, top_k=K, width=D, inner=F, dtype=dtype)
        for other in (*dtypes, torch.float16, torch.int64):
            for is_wrong in (rank == 1, True):
                if other != dtype:
                    x = torch.ones((3, D), dtype=other if is_wrong else dtype)
                    error = error_of(lambda layer=layer, x=x: layer(x))
                    same_everywhere(str(error))
                    assert f"x must have the dtype and device of the layer, {dtype} on cpu, got {other} on cpu" in str(error)
    assert layer(torch.ones((3, D), dtype=dtype)).dtype == dtype


@case(1)
def a_router_that_converts_tokens_may_get_others(rank, world):
    x = torch.ones((3, D))
    layer = MoELayer(num_experts=E, top_k=K, width=D, inner=F)
    layer.router.to(torch.float64)
    layer.router.register_forward_pre_hook(lambda module, inputs: tuple(given.double() for given in inputs))
    assert layer(x).dtype == x.dtype
    layer.router = torch.nn.Sequential(torch.nn.Linear(D, E))
    assert layer(x).dtype == x.dtype


@case(1)
def copies_of_a_layer_share_its_dispatcher(rank, world):
    layer = MoELayer(num_experts=E, top_k=K, width=D, inner=F)
    x = torch.randn(3, D)
    twin = copy.deepcopy(layer)
    assert twin.dispatcher is layer.dispatcher and torch.equal(twin(x), layer(x))
    twin.load_state_dict(layer.state_dict())
    with raises(TypeError, "Dispatcher belongs to its process", "state_dict"):
        pickle.dumps(layer)


# ---- The operators that GPUs use ----


def gradients_twice(out, inputs):
    """Gradients in one direction; a second backward of the same graph must give the same bits."""
    direction = torch.randn(out.shape, generator=random_of(7), dtype=out.dtype)
    first = torch.autograd.grad(out, inputs, direction, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(out, inputs, direction)):
        assert torch.equal(a, b)
    return first


@case(1)
def the_librarys_experts_equal_the_products(rank, world):
    """One expert has no rows; the last rows belong to no expert."""
    torch.manual_seed(0)
    experts = GroupedExperts(3, D, F, dtype=torch.float64)
    rows = torch.randn((9, D), dtype=torch.float64).requires_grad_()
    counts = torch.tensor([4, 0, 3])
    inputs = (rows, experts.w1, experts.w2)
    call = (rows, None, experts.w1, experts.w2, None, None, counts, *Form(), True)
    y, want = expert_mlp(*call)[0], experts(rows, counts)
    torch.testing.assert_close(y, want)
    for a, b in zip(gradients_twice(y, inputs), gradients_twice(want, inputs)):
        torch.testing.assert_close(a, b)
    experts.w1.requires_grad_(False)
    expert_mlp(*call)[0].sum().backward()
    assert experts.w1.grad is None and experts.w2.grad.shape == experts.w2.shape


def librarys_layer(layer, x, keep):
    """What a layer without options does on a GPU."""
    inputs = (x, layer.router.weight, None, layer.experts.w1, layer.experts.w2, *(None,) * 12)
    return whole_layer(*inputs, layer._state.key, 1, 0, layer.training, keep)[0]


@case(1, 4)
def the_librarys_layer_equals_the_steps(rank, world):
    for score, normalise in (("softmax", True), ("softmax", False), ("sigmoid", True)):
        torch.manual_seed(rank)
        options = dict(score=score, normalise=normalise, scale=1.5, dtype=torch.float64)
        layer = MoELayer(num_experts=E, top_k=K, width=D, inner=F, **options)
        x = torch.randn((tokens_of(rank, world), D), generator=random_of(rank), dtype=torch.float64).requires_grad_()
        inputs = (x, layer.router.weight, layer.experts.w1, layer.experts.w2)
        out, want = librarys_layer(layer, x, True), layer(x)
        torch.testing.assert_close(out, want)
        for a, b in zip(gradients_twice(out, inputs), gradients_twice(want, inputs)):
            torch.testing.assert_close(a, b)
        with torch.no_grad():
            assert torch.equal(librarys_layer(layer, x, False), out)


@case(1, 4)
def experts_with_nan_scores_are_chosen_last(rank, world):
    """The library's layer does the same."""
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(rank)
        layer = MoELayer(num_experts=E, top_k=K, width=D, inner=F, score="sigmoid", dtype=dtype)
        x = torch.randn((tokens_of(rank, world), D), generator=random_of(rank), dtype=dtype)
        with torch.no_grad():
            for e in (0, 3):
                layer.router.weight[e] = float("nan")
            expert_ids, weights = layer.route(x)
            assert not torch.isin(expert_ids, torch.tensor([0, 3])).any() and weights.isfinite().all()
            out = librarys_layer(layer, x, False)
            assert out.isfinite().all()
            torch.testing.assert_close(layer(x), out)
