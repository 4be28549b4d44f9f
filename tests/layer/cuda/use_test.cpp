// Uses of a layer on a GPU: pending backwards, delayed gradients, refusals.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "layer/cuda/layer_on_gpu.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

using ::testing::HasSubstr;

class CudaLayerUse : public CudaTest {};

TEST_F(CudaLayerUse, BitsDependNeitherOnOverlapNorOnRecomputation) {
  LayerCase layer_case = spread(medium_case(DType::kBF16), {100, 111});
  const std::vector<double> wanted = shared_bits(run_layer_on_gpu(layer_case));
  layer_case.config.overlap_shared = false;
  EXPECT_EQ(shared_bits(run_layer_on_gpu(layer_case)), wanted);
  layer_case.config.experts.recompute = true;
  EXPECT_EQ(shared_bits(run_layer_on_gpu(layer_case)), wanted);
}

TEST_F(CudaLayerUse, SeveralForwardsMayBePendingAndGradientsDelayed) {
  const LayerCase layer_case = spread(medium_case(DType::kBF16), {100, 111});
  const std::vector<RankResult> wanted = run_layer_on_gpu(layer_case);
  run_ranks(2, [&](Group& group) {
    LayerOnGpu gpu(group, layer_case);
    MoeForwardResult first = gpu.rank.forward();
    MoeForwardResult second = gpu.rank.forward();
    MoeForwardArgs again = gpu.rank.forward_args();
    again.decision = &second.saved.decision;
    MoeForwardResult third = gpu.rank.layer.forward(again);
    for (MoeForwardResult* forward : {&third, &first, &second}) {
      const RankResult got = gpu.backward_with_delayed_dw(*forward);
      EXPECT_EQ(find_difference(got, wanted[static_cast<size_t>(group.rank())], 0.0), "");
    }
  });
}

TEST_F(CudaLayerUse, GradientsAccumulate) {
  const LayerCase layer_case = medium_case(DType::kBF16);
  const RankResult once = run_layer_on_gpu(layer_case)[0];
  run_ranks(1, [&](Group& group) {
    LayerOnGpu gpu(group, layer_case, 0.0);
    RankResult result;
    for (int i = 0; i < 2; ++i) {
      MoeForwardResult forward = gpu.rank.forward();
      MoeBackwardArgs args = gpu.rank.backward_args(forward.saved);
      args.accumulate = true;
      const OwnedTensor grad_x = gpu.rank.layer.backward(args);
      result = gpu.result(forward, grad_x);
    }
    for (size_t e = 0; e < once.experts.size(); ++e) {
      for (size_t i = 0; i < once.experts[e].w1.size(); ++i) {
        ASSERT_NEAR(result.experts[e].w1[i], 2 * once.experts[e].w1[i], 1e-4);
      }
    }
    for (size_t i = 0; i < once.grad_gate.size(); ++i) {
      ASSERT_NEAR(result.grad_gate[i], 2 * once.grad_gate[i], 1e-4);
    }
  });
}

// Two micro-batches of a step: the counts of the first reach the second on the GPU.
TEST_F(CudaLayerUse, EarlierMicroBatchesCount) {
  LayerCase layer_case = spread(medium_case(DType::kF32), {100, 111});
  layer_case.config.router.aux_loss_scope = BalanceScope::kGlobalBatch;
  layer_case.config.router.z_loss_coeff = 0.2;
  std::vector<RouterLosses> wanted(2);
  std::vector<RouterStatistics> statistics(2);
  run_ranks(2, [&](Group& group) {
    LayerOnRank rank(group, layer_case);
    MoeForwardArgs args = rank.forward_args();
    const MoeForwardResult first = rank.layer.forward(args);
    args.earlier = &first.saved.decision.statistics;
    const MoeForwardResult second = rank.layer.forward(args);
    wanted[static_cast<size_t>(group.rank())] = second.saved.decision.losses;
    statistics[static_cast<size_t>(group.rank())] = second.saved.decision.statistics;
  });
  run_ranks(2, [&](Group& group) {
    const auto r = static_cast<size_t>(group.rank());
    LayerOnGpu gpu(group, layer_case);
    MoeForwardArgs args = gpu.rank.forward_args();
    const MoeForwardResult first = gpu.rank.layer.forward(args);
    args.earlier = &first.saved.decision.statistics;
    const MoeForwardResult second = gpu.rank.layer.forward(args);
    const MoeDecision decision = second.saved.decision.on_host(gpu.stream.view());
    EXPECT_NEAR(decision.losses.aux, wanted[r].aux, 1e-5);
    EXPECT_NEAR(decision.losses.z, wanted[r].z, 1e-5);
    EXPECT_EQ(decision.statistics.routes_per_expert, statistics[r].routes_per_expert);
    EXPECT_EQ(decision.statistics.num_tokens, statistics[r].num_tokens);
  });
}

TEST_F(CudaLayerUse, DropsAreCounted) {
  LayerCase layer_case = medium_case(DType::kF32);
  layer_case.config.dispatch.capacity = Capacity{.factor = 0.5};
  std::vector<int64_t> wanted;
  run_ranks(1, [&](Group& group) {
    wanted = LayerOnRank(group, layer_case).forward().saved.decision.dropped;
  });
  run_ranks(1, [&](Group& group) {
    LayerOnGpu gpu(group, layer_case);
    const MoeForwardResult forward = gpu.rank.forward();
    EXPECT_EQ(forward.saved.decision.on_host(gpu.stream.view()).dropped, wanted);
  });
  EXPECT_THAT(wanted, ::testing::Contains(::testing::Gt(0)));
}

TEST_F(CudaLayerUse, WeightGradientsMayHaveTheDtypeOfTheExperts) {
  const LayerCase layer_case = medium_case(DType::kBF16);
  const RankResult wanted = run_layer_on_gpu(layer_case)[0];
  run_ranks(1, [&](Group& group) {
    LayerOnGpu gpu(group, layer_case);
    MoeForwardResult forward = gpu.rank.forward();
    MoeBackwardArgs args = gpu.rank.backward_args(forward.saved);
    const OwnedTensor grad_w2 =
        device_tensor(DType::kBF16, args.grads.experts.w2.shape, gpu.stream);
    args.grads.experts.w2 = grad_w2.view;
    (void)gpu.rank.layer.backward(args);
    const std::vector<double> got = values_of(grad_w2.view, gpu.stream);
    size_t i = 0;
    for (const reference::MlpWeights& expert : wanted.experts) {
      for (const double value : expert.w2) {
        ASSERT_NEAR(got[i++], value, 1e-6 + std::abs(value) / 128);
      }
    }
  });
}

TEST_F(CudaLayerUse, EqualTokensAreRefusedByTheFirstForward) {
  LayerCase layer_case = spread(medium_case(DType::kBF16), {100, 100, 11});
  const int64_t values = 100 * layer_case.config.router.width;
  std::copy_n(layer_case.x.begin(), values, layer_case.x.begin() + values);
  std::copy_n(layer_case.mask.begin(), 100, layer_case.mask.begin() + 100);
  run_ranks(3, [&](Group& group) {
    LayerOnGpu gpu(group, layer_case);
    expect_refused(group, "those of ranks 0 and 1 are bit-identical",
                   [&] { (void)gpu.rank.forward(); });
    LayerCase allowed = layer_case;
    allowed.config.allow_equal_tokens = true;
    EXPECT_NO_THROW((void)LayerOnGpu(group, allowed).run());
  });
}

TEST_F(CudaLayerUse, RefusalsAreClearOnAllRanks) {
  run_ranks(2, [&](Group& group) {
    LayerCase layer_case = spread(medium_case(DType::kBF16), {100, 111});
    LayerCase sequences = layer_case;
    sequences.config.router.aux_loss_scope = BalanceScope::kSequence;
    LayerOnGpu by_sequence(group, sequences);
    expect_refused(group, "total_sequences", [&] { (void)by_sequence.rank.forward(); });
    LayerOnGpu gpu(group, layer_case);
    MoeForwardArgs args = gpu.rank.forward_args();
    const LayerOnRank host(group, layer_case);
    if (group.rank() == 1) args.weights = host.parameters.weights();
    const std::string gpu_of_rank_1 = "GPU " + std::to_string(1 % cuda_device_count());
    expect_refused(group, "must be on " + gpu_of_rank_1,
                   [&] { (void)gpu.rank.layer.forward(args); });
    args = gpu.rank.forward_args();
    if (group.rank() == 1) args.x = host.tokens.x.view;
    EXPECT_THROW((void)gpu.rank.layer.forward(args), Error);
  });
}

// The group stays usable.
TEST_F(CudaLayerUse, TransposedWeightsAreRefusedBeforeRowsMove) {
  run_ranks(2, [&](Group& group) {
    LayerCase layer_case = spread(medium_case(DType::kBF16), {100, 111});
    layer_case.config.experts.transposed = true;
    LayerOnGpu gpu(group, layer_case);
    MoeForwardArgs args = gpu.rank.forward_args();
    for (ExpertWeights* weights : {&args.weights.experts, &args.weights.shared}) {
      for (ConstTensorView* matrix : {&weights->w1, &weights->w2}) {
        const Shape shape = matrix->shape;
        matrix->shape = {shape[0], shape[2], shape[1]};
      }
    }
    expect_refused(group, "transposed weights are supported in host memory only",
                   [&] { (void)gpu.rank.layer.forward(args); });
  });
}

// The dispatch of a rank that differs would wait for the others in another stream.
TEST_F(CudaLayerUse, OverlapOfSharedExpertsMustBeIdenticalOnEveryRank) {
  run_ranks(2, [&](Group& group) {
    LayerCase layer_case = spread(medium_case(DType::kBF16), {100, 111});
    layer_case.config.overlap_shared = group.rank() == 0;
    LayerOnGpu gpu(group, layer_case);
    expect_refused(group, "overlap_shared=", [&] { (void)gpu.rank.forward(); });
  });
}

// Only rank 1 makes a mistake. The refused backward may be repeated.
TEST_F(CudaLayerUse, BackwardsAreRefusedBeforeRowsMove) {
  const LayerCase layer_case = spread(medium_case(DType::kBF16), {100, 111});
  run_ranks(2, [&](Group& group) {
    const bool is_wrong = group.rank() == 1;
    LayerOnGpu gpu(group, layer_case);
    MoeForwardResult forward = gpu.rank.forward();
    MoeBackwardArgs args = gpu.rank.backward_args(forward.saved);
    const OwnedTensor rounded =
        device_tensor(DType::kBF16, args.grads.experts.w2.shape, gpu.stream);
    args.accumulate = true;
    if (is_wrong) args.grads.experts.w2 = rounded.view;
    expect_refused(group, "accumulate needs gradients in fp32, got bf16",
                   [&] { (void)gpu.rank.layer.backward(args); });

    MoeForwardArgs again = gpu.rank.forward_args();
    const MoeDecision on_host = forward.saved.decision.on_host(gpu.stream.view());
    again.decision = is_wrong ? &on_host : &forward.saved.decision;
    expect_refused(group, "not a copy by on_host", [&] { (void)gpu.rank.layer.forward(again); });
    EXPECT_NO_THROW((void)gpu.rank.backward(forward.saved));
  });
}

}  // namespace
}  // namespace crossdock
