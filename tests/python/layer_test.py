"""Experts and layers with numpy arrays."""
import copy
import pickle

import numpy as np
import pytest
from conftest import run_threads

import crossdock
from crossdock import ExpertWeights, LayerGradients, LayerWeights

E, K, D, F = 4, 2, 6, 5


def parameters(dtype=np.float64):
    random = np.random.default_rng(7)
    make = lambda *shape: (random.standard_normal(shape) / 2).astype(dtype)
    return LayerWeights(gate=make(E, D), experts=ExpertWeights(make(E, 2 * F, D), make(E, D, F)))


def tokens(rank, dtype=np.float64):
    return np.random.default_rng(100 + rank).standard_normal((3 + rank, D)).astype(dtype)


def of_rank(weights, rank, size):
    share = slice(rank * E // size, (rank + 1) * E // size)
    return weights._replace(experts=ExpertWeights(weights.experts.w1[share], weights.experts.w2[share]))


def gradients(weights):
    zeros = [np.zeros_like(array) for array in (weights.gate, weights.experts.w1, weights.experts.w2)]
    return LayerGradients(gate=zeros[0], experts=ExpertWeights(zeros[1], zeros[2]))


def swiglu(rows, w1, w2):
    hidden = rows @ w1.T
    gate, linear = hidden[:, :F], hidden[:, F:]
    return (gate / (1 + np.exp(-gate)) * linear) @ w2.T


def layer_of(group, dtype="fp64", **options):
    return crossdock.Layer(group, num_experts=E, top_k=K, width=D, inner=F, dtype=dtype, **options)


@pytest.mark.parametrize("size", (1, 2, 4))
def test_a_layer_computes_what_its_formula_says(size):
    weights = parameters()

    def body(group):
        x = tokens(group.rank)
        layer = layer_of(group)
        assert layer.num_local_experts == E // size
        out, aux_loss, z_loss, saved, _ = layer.forward(x, of_rank(weights, group.rank, size))
        scores = np.exp(x @ weights.gate.T)
        scores /= scores.sum(axis=1, keepdims=True)
        expected = np.zeros_like(x)
        for t in range(len(x)):
            for e in np.argsort(-scores[t], kind="stable")[:K]:
                y = swiglu(x[t : t + 1], weights.experts.w1[e], weights.experts.w2[e])[0]
                expected[t] += scores[t, e] * y
        np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)
        assert aux_loss == z_loss == 0 and sum(saved.load()) == K * sum(3 + rank for rank in range(size))

    run_threads(size, body)


def test_gradients_of_a_layer_are_its_differences():
    weights = parameters()

    def body(group):
        layer = layer_of(group, router={"aux_loss_coeff": 0.01, "z_loss_coeff": 0.01})
        x, direction = tokens(0), np.random.default_rng(3).standard_normal((3, D))

        def loss(x, weights):
            forward = layer.forward(x, weights, save=False)
            return (forward.out * direction).sum() + forward.aux_loss + forward.z_loss

        forward = layer.forward(x, weights)
        assert forward.saved.losses() == (forward.aux_loss, forward.z_loss, forward.aux_losses)
        assert forward.aux_loss > 0 and forward.saved.device_losses is None
        grads = gradients(weights)
        grad_x = layer.backward(x, weights, direction, forward.saved, grads)
        step = 1e-6
        for array, gradient in (
            (x, grad_x),
            (weights.gate, grads.gate),
            (weights.experts.w1, grads.experts.w1),
            (weights.experts.w2, grads.experts.w2),
        ):
            for index in list(np.ndindex(array.shape))[::7]:
                old = array[index]
                array[index] = old + step
                above = loss(x, weights)
                array[index] = old - step
                below = loss(x, weights)
                array[index] = old
                assert gradient[index] == pytest.approx((above - below) / (2 * step), rel=1e-5, abs=1e-8)

    run_threads(1, body)


def test_delayed_gradients_have_the_same_bits():
    weights = parameters(np.float32)

    def body(group):
        own = of_rank(weights, group.rank, 2)
        layer = layer_of(group, "fp32", dispatch={"alignment": 8}, overlap_chunks=2)
        x = tokens(group.rank, np.float32)
        results = []
        for delay in (False, True):
            forward = layer.forward(x, own)
            grads = gradients(own)
            grad_x = layer.backward(x, own, np.ones_like(x), forward.saved, grads, delay_dw=delay)
            if delay:
                layer.backward_dw(x, own, np.ones_like(x), forward.saved, grads)
            results.append((forward.out, grad_x, grads.gate, grads.experts.w1, grads.experts.w2))
        for at_once, delayed in zip(*results):
            np.testing.assert_array_equal(at_once, delayed)

    run_threads(2, body)


def test_experts_between_dispatch_and_combine_are_a_layer():
    weights = parameters(np.float32)

    def body(group):
        own = of_rank(weights, group.rank, 2)
        x = tokens(group.rank, np.float32)
        random = np.random.default_rng(group.rank)
        ids = np.stack([random.permutation(E)[:K] for _ in x]).astype(np.int64)
        route_weights = random.random((len(x), K), np.float32)
        dispatcher = crossdock.Dispatcher(group, num_experts=E, top_k=K, width=D)
        experts = crossdock.Experts(num_local_experts=E // 2, width=D, inner=F)
        plan = dispatcher.plan(ids, route_weights)
        sent = dispatcher.dispatch(plan, x, row_weights=True)
        y, saved = experts.forward(plan, own.experts, sent.rows)
        for local in range(E // 2):
            rows = slice(plan.segment_starts[local], plan.segment_starts[local] + plan.segment_counts[local])
            expected = swiglu(sent.rows[rows], own.experts.w1[local], own.experts.w2[local])
            np.testing.assert_allclose(y[rows], expected, rtol=1e-5, atol=1e-5)
        grad_y = dispatcher.dispatch(plan, np.ones_like(x)).rows
        grad_rows, grad_row_weights = experts.backward_dx(
            plan, own.experts, sent.rows, grad_y, saved, sent.row_weights, grad_row_weights=True
        )
        np.testing.assert_allclose(grad_row_weights, y.sum(axis=1), rtol=1e-5, atol=1e-5)
        grads = ExpertWeights(np.zeros_like(own.experts.w1), np.zeros_like(own.experts.w2))
        experts.backward_dw(plan, own.experts, sent.rows, grad_y, saved, sent.row_weights, grads=grads)
        assert grad_rows.shape == sent.rows.shape and np.abs(grads.w1).sum() > 0

    run_threads(2, body)


def test_expert_shards_compute_what_whole_experts_do():
    weights = parameters()
    half = F // 2 + F % 2  # of F = 5 the first shard has 3 columns

    def shard(rank):
        columns = slice(0, half) if rank == 0 else slice(half, F)
        w1 = weights.experts.w1.reshape(E, 2, F, D)[:, :, columns].reshape(E, -1, D)
        return weights._replace(experts=ExpertWeights(np.ascontiguousarray(w1), np.ascontiguousarray(weights.experts.w2[:, :, columns])))

    def body(group):
        x = tokens(group.rank)
        out = layer_of(group, etp=2).forward(x, shard(group.rank)).out
        (alone,) = crossdock.Group.from_threads(1)
        np.testing.assert_allclose(out, layer_of(alone).forward(x, weights).out, rtol=1e-12, atol=1e-12)

    run_threads(2, body)


def test_replicated_tokens_are_refused_unless_stated():
    weights = parameters()

    def body(group):
        x, own = tokens(5), of_rank(weights, group.rank, 2)
        with pytest.raises(crossdock.Error, match="those of ranks 0 and 1 are bit-identical"):
            layer_of(group).forward(x, own)
        allowed = layer_of(group, allow_equal_tokens=True).forward(x, own)
        replicated = layer_of(group, replicated_over=group).forward(x, own)
        np.testing.assert_array_equal(replicated.out, allowed.out)
        assert sum(allowed.saved.load()) == 2 * sum(replicated.saved.load()) == 2 * K * len(x)
        assert allowed.saved.dropped() == [0] * E

    run_threads(2, body)


def test_several_losses_are_reported_apart():
    weights = parameters()

    def body(group):
        x, own = tokens(group.rank), of_rank(weights, group.rank, 2)
        coeffs = {"batch": 0.5, "sequence": 0.25}
        both = layer_of(group, router={"aux_loss_coeffs": coeffs}).forward(x, own)
        batch, sequence, global_batch = both.aux_losses
        assert batch == layer_of(group, router={"aux_loss_coeff": 0.5}).forward(x, own).aux_loss > 0
        assert sequence > 0 and global_batch == 0 and both.aux_loss == pytest.approx(batch + sequence, rel=1e-12)
        with pytest.raises(ValueError, match="must be one of batch, sequence, global_batch, got 'batches'"):
            layer_of(group, router={"aux_loss_coeffs": {"batches": 1.0}})

    run_threads(2, body)


def test_the_bias_moves_towards_the_mean_load():
    bias = np.zeros(4, np.float32)
    crossdock.update_expert_bias(bias, [4, 0, 2, 2], 0.5)
    np.testing.assert_array_equal(bias, [-0.5, 0.5, 0, 0])
    for load in ([4, 0, 2], [4, 0, 2, 2, 0]):
        with pytest.raises(ValueError, match=f"one entry per value of bias \\(4\\), got {len(load)}"):
            crossdock.update_expert_bias(bias, load, 0.5)


@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf")))
def test_a_rate_that_is_not_finite_is_refused(value):
    with pytest.raises(crossdock.Error, match="must be finite, got"):
        crossdock.update_expert_bias(np.zeros(2, np.float32), [1, 0], value)


def test_integers_that_a_field_cannot_hold_are_refused():
    with pytest.raises(ValueError, match=r"load\[1\] must be in .*, got 9223372036854775808"):
        crossdock.update_expert_bias(np.zeros(2, np.float32), [0, 2**63], 0.5)
    with pytest.raises(ValueError, match="inner must be in .*, got 18446744073709551617"):
        crossdock.Experts(num_local_experts=1, width=1, inner=2**64 + 1)


def test_values_of_a_forward_are_not_copied():
    """A copy would free them a second time."""
    (group,) = crossdock.Group.from_threads(1)
    layer, weights, x = layer_of(group), parameters(), tokens(0)
    out, _, _, saved, _ = layer.forward(x, weights)
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="LayerSaved belongs to its process and cannot be copied or pickled"):
            make(saved)
    assert copy.deepcopy(layer) is layer
    assert layer.backward(x, weights, np.ones_like(out), saved, gradients(weights)).shape == x.shape


def test_closed_objects_are_an_error():
    (group,) = crossdock.Group.from_threads(1)
    layer, weights, x = layer_of(group), parameters(), tokens(0)
    layer.close()
    with pytest.raises(crossdock.Error, match="^the layer has been closed$"):
        layer.forward(x, weights)
    (other,) = crossdock.Group.from_threads(1)
    other.close()
    for name in ("counting_group", "sequence_group", "replicated_over"):
        with pytest.raises(crossdock.Error, match=f"^the {name} has been closed$"):
            layer_of(group, **{name: other})


def test_an_unknown_word_lists_the_known_ones():
    with pytest.raises(ValueError, match="swiglu"):
        crossdock.Experts(num_local_experts=1, width=1, inner=1, activation="relu")
