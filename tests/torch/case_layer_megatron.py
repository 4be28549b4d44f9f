"""MoELayer's router against Megatron-core's: choices, weights, losses, bias updates, masks, replay and drops, with gradients."""
import types
import warnings

warnings.simplefilter("ignore")
import megatron_on_cpu  # noqa: E402,F401
import torch
import torch.distributed as dist
from case_layer_options import close, forward_hook
from cases import case, random_of
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig

from crossdock.torch import MoELayer, group, set_loss_scale

E, K, D, F, L, B = 8, 4, 16, 12, 6, 2
SHARED = "counting_group"  # Megatron's ranks share sequences and batches


def megatron_router(gate, bias=None, expert_bias=None, **options):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=D,
        num_attention_heads=2,
        num_moe_experts=E,
        moe_router_topk=K,
        use_cpu_initialization=True,
        add_bias_linear=bias is not None,
        moe_router_dtype="fp32",
        **{"moe_router_load_balancing_type": "none", "moe_router_pre_softmax": True, **options},
    )
    world = dist.group.WORLD
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    router = TopKRouter(config, types.SimpleNamespace(tp=alone, cp=alone, tp_cp=world, tp_dp_cp=world))
    router.set_layer_number(1)
    with torch.no_grad():
        router.weight.copy_(gate)
        if bias is not None:
            router.bias.copy_(bias)
        if expert_bias is not None:
            router.expert_bias.copy_(expert_bias)
    return router


def expert(x, w1, w2):
    gate, linear = (x @ w1.t()).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * linear) @ w2.t()


class Problem:
    """The same layer here and there."""

    def __init__(self, rank, world, ours, theirs, has_steps=False):
        torch.manual_seed(3)
        self.layer = MoELayer(num_experts=E, top_k=K, width=D, inner=F, gradients="summed", **ours)
        torch.manual_seed(3)
        alone = group(dist.new_group([rank], use_local_synchronization=True))
        has_bias = self.layer.config.router_bias
        whole = MoELayer(alone, num_experts=E, top_k=K, width=D, inner=F, router_bias=has_bias)
        self.w1, self.w2 = whole.experts.w1.detach(), whole.experts.w2.detach()
        bias = torch.linspace(-0.5, 0.5, E) if self.layer.config.router_bias else None
        expert_bias = torch.randn(E, generator=random_of(8)) / 4 if self.layer.config.expert_bias else None
        with torch.no_grad():
            if bias is not None:
                self.layer.router.bias.copy_(bias)
            if expert_bias is not None:
                self.layer.expert_bias.copy_(expert_bias)
        if has_steps:
            self.layer.router.register_forward_hook(forward_hook)
        self.router = megatron_router(self.layer.router.weight.detach(), bias, expert_bias, **theirs)

    def theirs(self, x, grad_out, mask=None):
        """x [L, B, D] -> out, the gradients of x, router, w1 and w2 of this rank's tokens, and the map."""
        moe_utils.clear_aux_losses_tracker()
        moe_utils.get_moe_layer_wise_logging_tracker().clear()
        x, w1, w2 = (value.detach().clone().requires_grad_() for value in (x, self.w1, self.w2))
        probs, routes = self.router(x, mask)
        tokens = x.view(-1, D)
        dense = torch.stack([expert(tokens, w1[e], w2[e]) for e in range(E)], dim=1)  # [T, E, D]
        out = (dense * torch.where(routes, probs, 0.0)[..., None]).sum(1).view_as(x)
        self.router.zero_grad()
        out.backward(grad_out)
        return out, x.grad, [p.grad for p in self.router.parameters()], (w1.grad, w2.grad), routes

    def check(self, rank, step=0, mask=None, **keywords):
        """One micro-batch; returns our report and their losses."""
        generator = random_of(rank, 20 + step)
        x, grad_out = (torch.randn((L, B, D), generator=generator) for _ in range(2))
        if mask is not None:  # Megatron computes padding
            grad_out = torch.where(mask[..., None], 0.0, grad_out)
        out, grad_x, grads, experts, routes = self.theirs(x, grad_out, mask)
        x = x.requires_grad_()
        self.layer.zero_grad()
        got = self.layer(x, padding_mask=mask, **keywords)
        got.backward(grad_out)
        valid = torch.ones(L, B, dtype=torch.bool) if mask is None else ~mask
        close(got[valid], out[valid])
        close(x.grad[valid], grad_x[valid])
        for a, b in zip(self.layer.router.parameters(), grads):
            close(a.grad, b)
        for a, b in zip(self.layer.experts.parameters(), experts):
            dist.all_reduce(b)
            close(a.grad, b[self.layer.local_experts])
        tracker = moe_utils.get_moe_layer_wise_logging_tracker()
        return self.layer.report, {name: entry["values"].sum() for name, entry in tracker.items()}, routes


CHOICES = (
    (dict(score="softmax", normalise=False, report=True), dict()),
    (dict(score="softmax_after_top_k", scale=2.0), dict(moe_router_pre_softmax=False, moe_router_topk_scaling_factor=2.0)),
    (dict(score="sigmoid", report=True, scale=2.5), dict(moe_router_score_function="sigmoid", moe_router_topk_scaling_factor=2.5)),
    (
        dict(score="sigmoid", expert_bias=True, num_groups=4, group_top_k=2),
        dict(
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_router_num_groups=4,
            moe_router_group_topk=2,
        ),
    ),
    (dict(normalise=False, num_groups=2, group_top_k=1), dict(moe_router_num_groups=2, moe_router_group_topk=1)),
    (dict(normalise=False, router_bias=True), dict()),
)


@case(1, 2, 4)
def choices_and_weights(rank, world):
    for ours, theirs in CHOICES:
        for has_steps in (False, True):
            report, _, routes = Problem(rank, world, ours, theirs, has_steps).check(rank)
            if not has_steps:
                chosen = torch.zeros(L * B, E, dtype=torch.bool).scatter(1, report.expert_ids.long(), True)
                assert torch.equal(chosen, routes)


LOSSES = (
    ("load_balancing_loss", dict(aux_loss_coeff=0.5), dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.5)),
    (
        "seq_load_balancing_loss",
        dict(aux_loss_coeff=0.5, aux_loss_scope="sequence"),
        dict(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.5),
    ),
    (
        "global_load_balancing_loss",
        dict(aux_loss_coeff=0.5, aux_loss_scope="global_batch"),
        dict(moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=0.5),
    ),
    ("z_loss", dict(z_loss_coeff=0.25), dict(moe_z_loss_coeff=0.25)),
    (
        "load_balancing_loss",
        dict(aux_loss_coeffs={"batch": 0.5, "sequence": 0.25}, z_loss_coeff=0.125),
        dict(
            moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"],
            moe_aux_loss_coeff=[0.5, 0.25],
            moe_z_loss_coeff=0.125,
        ),
    ),
)


@case(1, 2, 4)
def losses_and_their_gradients(rank, world):
    equal_losses(rank, world)


def equal_losses(rank, world, mask=None):
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(0.5))
    set_loss_scale(0.5)
    sequences = dict(sequence_ids=torch.arange(B).expand(L, B), num_sequences=B)
    for score in ("softmax", "sigmoid"):
        for name, ours, theirs in LOSSES:
            for has_steps in (False, True):
                everyone = {SHARED: dist.group.WORLD} if "sequence" in str(ours) else {}
                mine = dict(ours, score=score, normalise=score == "sigmoid", **everyone)
                problem = Problem(rank, world, mine, dict(theirs, moe_router_score_function=score), has_steps)
                report, found, _ = problem.check(rank, mask=mask, **sequences)
                if not has_steps:
                    coefficient = 1 / world if name == "z_loss" else 1.0  # Megatron logs the mean of this rank's tokens
                    terms = dict(zip(("load", "seq", "global"), report.losses[2:]))
                    term = report.z_loss if name == "z_loss" else terms[name.split("_")[0]]
                    weight = 0.25 if name == "z_loss" else 0.5
                    close(term.float(), (found[name] * weight * coefficient).float())
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    set_loss_scale(1.0)


@case(1, 2, 4)
def a_loss_over_the_global_batch_is_megatrons_divided_by_the_micro_batches_so_far(rank, world):
    options = dict(moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=0.5)
    for has_steps in (False, True):
        ours = dict(aux_loss_coeff=0.5, aux_loss_scope="global_batch", normalise=False)
        problem = Problem(rank, world, ours, options, has_steps)
        for number in (1, 2, 3):
            x, grad_out = (torch.randn((L, B, D), generator=random_of(rank, 10 * number + i)) for i in (0, 1))
            problem.theirs(x, grad_out)
            problem.layer(x).backward(grad_out)
            found = moe_utils.get_moe_layer_wise_logging_tracker()["global_load_balancing_loss"]["values"].sum()
            close((problem.layer.report.losses[4] * number).float(), (found * 0.5).float())
        problem.layer.start_step()
        problem.layer(x)
        first = problem.layer.report.losses[4]
        problem.router.reset_global_aux_loss_tracker()
        problem.theirs(x, grad_out)
        found = moe_utils.get_moe_layer_wise_logging_tracker()["global_load_balancing_loss"]["values"].sum()
        close(first.float(), (found * 0.5).float())


@case(1, 2, 4)
def losses_with_padding(rank, world):
    mask = torch.arange(L * B).view(L, B) % (3 + rank) == 1
    for score in ("softmax", "sigmoid"):
        options = dict(moe_router_score_function=score, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.5)
        problem = Problem(rank, world, dict(aux_loss_coeff=0.5, score=score, normalise=score == "sigmoid"), options)
        report, found, _ = problem.check(rank, mask=mask)
        close(report.aux_loss.float(), (found["load_balancing_loss"] * 0.5).float())
        assert (report.expert_ids[mask.view(-1)] == -1).all()


@case(1, 2, 4)
def all_losses_with_padding(rank, world):
    """As much in every sequence: Megatron divides by the mean."""
    mask = (torch.arange(L)[:, None] + torch.arange(B) + rank) % 3 == 1
    assert (mask.sum(0) == L // 3).all()
    equal_losses(rank, world, mask)


@case(1, 2, 4)
def updates_of_the_expert_bias(rank, world):
    """Of two steps with two micro-batches each."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=world)
    theirs = dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    for has_steps in (False, True):
        problem = Problem(rank, world, dict(score="sigmoid", expert_bias=True), theirs, has_steps)
        router = problem.router
        for step in range(2):
            for micro_batch in range(2):
                problem.check(rank, 2 * step + micro_batch)
            updated = moe_utils.get_updated_expert_bias(router.local_tokens_per_expert, router.expert_bias, 0.125)
            router.expert_bias.copy_(updated)
            router.local_tokens_per_expert.zero_()
            problem.layer.update_expert_bias(0.125)
            assert torch.equal(problem.layer.expert_bias, router.expert_bias)


@case(1, 2, 4)
def replayed_routes(rank, world):
    theirs = dict(moe_router_score_function="sigmoid", moe_enable_routing_replay=True)
    problem = Problem(rank, world, dict(score="sigmoid"), theirs)
    ids = torch.rand((L * B, E), generator=random_of(rank, 2)).argsort(dim=1)[:, :K]
    problem.router.router_replay.set_target_indices(ids)
    problem.router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    report, _, _ = problem.check(rank, forced_ids=ids.view(L, B, K))
    assert torch.equal(report.expert_ids.long(), ids)
    RouterReplay.clear_global_router_replay_instances()


@case(1, 2, 4)
def dropped_routes(rank, world):
    """By weight: where Megatron drops by position, the order of torch's topk decides."""
    theirs = dict(moe_router_score_function="sigmoid", moe_expert_capacity_factor=0.75, moe_token_drop_policy="probs")
    ours = dict(score="sigmoid", capacity_factor=0.75, drop_policy="weight", report=True)
    report, _, routes = Problem(rank, world, ours, theirs).check(rank)
    chosen = torch.zeros(E, dtype=torch.int64).index_add(0, report.expert_ids.long().view(-1), torch.ones(L * B * K).long())
    assert report.dropped.sum() > 0 and torch.equal(chosen - report.dropped, routes.sum(0))
