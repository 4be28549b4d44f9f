"""Options and arguments of MoELayer that cannot be used: the same error on every rank, with the reason."""
import torch
from cases import case, error_of, raises, random_of, same_everywhere

from crossdock.torch import Dispatcher, GroupedExperts, MoELayer

E, K, D, F = 8, 4, 8, 12
SIZES = dict(num_experts=E, top_k=K, width=D, inner=F)

WRONG_OPTIONS = (
    (dict(score="sofmax"), "score must be one of softmax, softmax_after_top_k, sigmoid, sqrt_softplus, got 'sofmax'; did you mean 'softmax'?"),
    (dict(aligment=8), "MoELayer has no option 'aligment'; did you mean 'alignment'?"),
    (dict(repport=True), "MoELayer has no option 'repport'; did you mean 'report'?"),
    (dict(activation="swiglue", report=True), "did you mean 'swiglu'?"),
    (dict(aux_loss_scope="sequences", aux_loss_coeff=0.1, report=True), "did you mean 'sequence'?"),
    (dict(aux_loss_coeffs={"batches": 0.1}, report=True), "a scope of aux_loss_coeffs must be one of batch, sequence, global_batch"),
    (dict(aux_loss_coeffs=0.1, report=True), "aux_loss_coeffs: "),
    (dict(z_loss_coeff=-1.0, report=True), "z_loss_coeff must be a finite number of at least 0, got -1.0"),
    (dict(jitter=1.0, report=True), "jitter must be in [0, 1), got 1.0"),
    (dict(limit=0, report=True), "limit must be above 0, got 0"),
    (dict(scale=float("nan")), "scale must be a finite number, got nan"),
    (dict(top_k=E + 1), f"num_experts ({E}) must be at least top_k ({E + 1})"),
    (dict(num_groups=3, report=True), f"num_experts ({E}) must be a multiple of num_groups (3)"),
    (dict(num_groups=4, group_top_k=3, report=True), "top_k (4) must be a multiple of group_top_k (3)"),
    (dict(num_groups=8, group_top_k=2, report=True), "top_k (4) must be at most the experts of group_top_k groups (2)"),
    (dict(num_experts=0), "num_experts must be an integer of at least 1, got 0"),
    (dict(inner=None), "pass either inner, the inner width of the experts, or experts of your own"),
    (dict(placement=[0]), "placement must have num_experts (8) entries, got 1"),
    (dict(placement=7), "placement: "),
    (dict(etp=3, report=True), "etp (3) must divide the number of ranks of the group"),
    (dict(activation="gelu", interleaved=True, report=True), "interleaved needs one of the activations"),
    (dict(top_k=1, report=True, normalise=True), "normalise=True with top_k=1 would make every weight 1; pass normalise=False"),
    (dict(capacity_factor=0), "capacity_factor must be positive, got 0"),
    (dict(max_rows=0), "max_rows must be positive, got 0"),
    (dict(strategy="dirct"), "; did you mean 'direct'?"),
    (dict(strategy=7), "strategy must be a string, got 7"),
)


@case(1, 2)
def the_first_call_reports_a_wrong_option(rank, world):
    x = torch.randn((3, D), generator=random_of(rank))
    for options, words in WRONG_OPTIONS:
        culprit = world - 1
        whole = dict(report=True, normalise=False) if "report" in options or "repport" in options else {}
        layer = MoELayer(**{**SIZES, **whole, **(options if rank == culprit else {})})
        assert list(layer.parameters()), "an optimizer needs parameters"
        for _ in range(2):
            error = error_of(lambda layer=layer: layer(x))
            same_everywhere(str(error))
            assert words in str(error) and error.culprit == culprit, error
            assert (error.__cause__ is not None) == (rank == culprit)
        if rank == culprit:
            with raises((TypeError, ValueError), words):
                layer.validate()
            assert "invalid: " in repr(layer)
        else:
            assert layer.validate() is layer
    mask = torch.tensor([False, True, False])  # which decides what layers without options call
    for normalise in (False, True):
        layer = MoELayer(**{**SIZES, "top_k": 1, "normalise": normalise}, **(dict(aligment=8) if rank == culprit else {}))
        error = error_of(lambda layer=layer: layer(x, padding_mask=mask))
        same_everywhere(str(error))
        assert "MoELayer has no option 'aligment'" in str(error), error
    assert MoELayer(**SIZES)(x).shape == x.shape  # the group stays usable


@case(2)
def ranks_with_different_options_name_them(rank, world):
    layer = MoELayer(**SIZES, z_loss_coeff=0.1 * (1 + rank))
    error = error_of(lambda: layer(torch.ones(2, D)))
    same_everywhere(str(error))
    assert "z_loss=0.1" in str(error) and "z_loss=0.2" in str(error), error


@case(1, 2)
def wrong_arguments_of_a_forward(rank, world):
    for in_steps in (False, True):
        layer = MoELayer(**SIZES, aux_loss_coeff=0.1, aux_loss_scope="sequence")
        if in_steps:
            layer.router.register_forward_hook(lambda *_: None)
        refuses_wrong_arguments(layer, rank, world)


def refuses_wrong_arguments(layer, rank, world):
    x = torch.randn((2, 3, D), generator=random_of(rank))
    culprit = world - 1
    for wrong, words in (
        (dict(padding_mask=torch.zeros(3, dtype=torch.bool)), "padding_mask must be a tensor [2, 3], got [3]"),
        (dict(padding_mask=torch.zeros(2, 3)), "padding_mask must be bool, True for padding, got torch.float32"),
        (dict(padding_mask=[1]), "padding_mask must be a tensor [2, 3], got list"),
        (dict(forced_ids=torch.zeros((2, 3, K + 1))), f"forced_ids must be a tensor [2, 3, {K}], got [2, 3, {K + 1}]"),
        (dict(forced_ids=torch.full((2, 3, K), E)), f"must be in [0, {E}) or -1, got {E}"),
        (dict(sequence_ids=torch.zeros((2, 3))), "sequence_ids need num_sequences"),
        (dict(forced_ids=torch.full((2, 3, K), -2)), f"must be in [0, {E}) or -1, got -2"),
        (dict(sequence_ids=torch.full((2, 3), 5), num_sequences=2), "sequence_ids[0] must be in [0, 2), got 5"),
    ):
        error = error_of(lambda wrong=wrong: layer(x, **(wrong if rank == culprit else {})))
        same_everywhere(str(error))
        assert words in str(error) and error.culprit == culprit, error
    assert layer(x).shape == x.shape


@case(1)
def options_that_changed_modules_rule_out_say_so(rank, world):
    for name, value in dict(delay_dw=True, allow_equal_tokens=False).items():
        layer = MoELayer(**SIZES, **{name: value})
        layer.router.register_forward_hook(lambda *_: None)
        error = error_of(lambda layer=layer: layer(torch.ones(2, D)))
        assert f"{name} needs the library's whole layer, which a layer with changed modules rules out" in str(error)
    own = MoELayer(num_experts=E, top_k=K, width=D, experts=torch.nn.Identity(), bias=True)
    with raises(ValueError, "bias is an option of the library's experts; pass inner instead of your own experts"):
        own.validate()
    for wrong, words in ((dict(activation="relu"), "activation must be one of"), (dict(weights_in="expert"), "'experts'")):
        with raises(ValueError, words):
            GroupedExperts(2, D, F, **wrong)
    with raises(ValueError, "this layer has no expert bias; pass expert_bias=True"):
        MoELayer(**SIZES).update_expert_bias()


@case(1, 2)
def tensors_that_the_library_cannot_read_are_named_on_every_rank(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=2, width=D)
    ids, weights = torch.arange(6).view(3, 2), torch.ones(3, 2)
    x = torch.ones(3, D)
    culprit = world - 1
    for wrong, words in (
        ((x.to_sparse(), ids, weights), "x: "),
        ((x.to(torch.complex64), ids, weights), "x: tensors of dtype torch.complex64 on cpu are not supported"),
        ((x, ids.to(torch.int8), weights), "expert_ids: tensors of dtype torch.int8 on cpu are not supported"),
    ):
        error = error_of(lambda wrong=wrong: dispatcher.dispatch(*(wrong if rank == culprit else (x, ids, weights))))
        same_everywhere(str(error))
        assert words in str(error) and error.culprit == culprit, error


@case(1)
def a_layer_shows_its_options(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=2, width=D, alignment=8)
    assert repr(dispatcher) == "Dispatcher(num_experts=8, top_k=2, width=8, alignment=8, nonfinite='propagate', rank 0 of 1)"
    with raises(TypeError, "Dispatcher has no option 'aligment'; did you mean 'alignment'?"):
        Dispatcher(num_experts=E, top_k=2, width=D, aligment=8)
    layer = MoELayer(**SIZES, score="sigmoid", aux_loss_coeffs={"batch": 0.1}, shared_inner=3, activation="geglu", bias=True)
    text = repr(layer)
    for words in (
        "num_experts=8, top_k=4, width=8, inner=12, score='sigmoid'",
        "aux_loss_coeffs={'batch': 0.1}",
        "rank 0 of 1",
        "num_local_experts=8, width=8, inner=12, activation='geglu', bias=True",
        "(shared): GroupedExperts(",
    ):
        assert words in text, text


@case(1, 2)
def own_experts_and_routes_keep_losses(rank, world):
    """An overridden route has no losses, but dispatches with every option of rows and experts."""

    class First(MoELayer):
        def route(self, x):
            ids = torch.arange(K).expand(x.shape[0], K).contiguous()
            return ids, torch.full((x.shape[0], K), 1 / K, dtype=x.dtype)

    layer = First(**SIZES, expert_bias=True, shared_inner=3)
    x = torch.randn((3, D), generator=random_of(rank))
    mask = torch.tensor([False, True, False])
    out = layer(x, padding_mask=mask)
    torch.testing.assert_close(out[1:2], layer.shared(x[1:2], torch.tensor([1])))
    layer.eval()
    assert layer(x).shape == x.shape
    for run in (lambda: layer(x, forced_ids=torch.zeros((3, K), dtype=torch.int64)), lambda: First(**SIZES, z_loss_coeff=0.1)(x)):
        assert "losses and forced_ids need the layer's own route, which is overridden" in str(error_of(run))
    double = MoELayer(num_experts=E, top_k=K, width=D, experts=Doubling(), aux_loss_coeff=0.5, weights_in="experts", scale=3.0)
    y = x.clone().requires_grad_()
    out = double(y)
    torch.testing.assert_close(out, 6 * x)
    out.sum().backward()
    assert double.router.weight.grad.any()


class Doubling(torch.nn.Module):
    def forward(self, rows, tokens_per_expert, row_weights):
        return 2 * rows * row_weights[:, None]
