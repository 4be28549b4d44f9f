// Layers with sharded experts on a GPU: against the reference, and the bits of their sums.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "experts/shared_experts.hpp"
#include "layer/cuda/layer_on_gpu.hpp"
#include "layer/device_memory.hpp"
#include "layer/etp_cases.hpp"

namespace crossdock {
namespace {

class CudaShards : public CudaTest {};

void expect_reference(const LayerCase& layer_case, double tolerance, const std::string& name) {
  const std::vector<RankResult> wanted = run_reference(layer_case);
  const std::vector<RankResult> got = run_layer_on_gpu(layer_case);
  for (size_t rank = 0; rank < got.size(); ++rank) {
    EXPECT_EQ(find_difference(got[rank], wanted[rank], tolerance), "")
        << name << ", " << layer_case.config.strategy << ", etp " << layer_case.config.etp
        << ", rank " << rank << " of " << got.size();
  }
}

constexpr double kTolerance = 2e-5;  // fp32

// The cases of list_etp_cases in fp32.
std::vector<NamedCase> list_cases(int num_ranks, int64_t etp) {
  std::vector<NamedCase> cases = list_etp_cases(num_ranks, etp);
  for (NamedCase& named : cases) named.options.config.experts.dtype = DType::kF32;
  return cases;
}

TEST_F(CudaShards, OfALayerGiveTheValuesOfWholeExperts) {
  for (const auto& [num_ranks, etp] : {std::pair{2, 2}, {4, 2}, {4, 4}}) {
    for (const NamedCase& named : list_cases(num_ranks, etp)) {
      LayerCase layer_case = make_case(named.options);
      expect_reference(layer_case, kTolerance, named.name);
      layer_case.config.dispatch.max_rows = most_rows(layer_case);
      expect_reference(layer_case, kTolerance, named.name + " with max_rows");
    }
  }
}

// Shards of 20 columns are computed by plain kernels.
TEST_F(CudaShards, GiveTheValuesOfWholeExpertsInSixteenBits) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const double tolerance = dtype == DType::kBF16 ? 3e-2 : 4e-3;
    for (const WeightsIn weights_in : {WeightsIn::kCombine, WeightsIn::kExperts}) {
      for (const int64_t inner : {16, 20}) {
        for (LayerCase layer_case : {sharded_case(dtype, 2, {100, 111}, inner),
                                     sharded_case(dtype, 2, {0, 60, 150, 1}, inner),
                                     sharded_case(dtype, 4, {0, 60, 150, 1}, inner)}) {
          layer_case.config.experts.weights_in = weights_in;
          expect_reference(layer_case, tolerance, std::string(name_of(dtype)));
        }
      }
    }
  }
}

TEST_F(CudaShards, GiveTheValuesOfWholeExpertsWithEveryStrategyAndPartialSums) {
  for (const std::string& strategy : strategy_names()) {
    LayerCase layer_case = make_case(list_cases(4, 2)[2].options);
    layer_case.config.strategy = strategy;
    expect_reference(layer_case, kTolerance, "every row");
    layer_case.config.dispatch.partial_sums = PartialSums::kF32;
    expect_reference(layer_case, kTolerance, "partial sums");
  }
}

TEST_F(CudaShards, TakeAnyRoutes) {
  const LayerCase layer_case = make_case(list_cases(4, 2)[0].options);
  expect_reference(one_expert_takes_all(layer_case), kTolerance, "one expert takes all");
  expect_reference(with_unused_slots(layer_case), kTolerance, "unused slots");
  expect_reference(spread(layer_case, {0, 0, 0, first_token(layer_case, 4)}), kTolerance,
                   "one rank has tokens");
  NamedCase named = list_cases(4, 2)[2];
  named.options.tokens_per_rank.assign(4, 0);
  expect_reference(make_case(named.options), kTolerance, "no token");
}

TEST_F(CudaShards, HaveTheSameBitsForEveryStrategyAndNumberOfRanks) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::vector<double> wanted =
        shared_bits(run_layer_on_gpu(sharded_case(dtype, 2, {100, 111})));
    LayerCase layer_case = sharded_case(dtype, 2, {0, 60, 150, 1});
    for (const std::string& strategy : strategy_names()) {
      layer_case.config.strategy = strategy;
      const std::vector<double> got = shared_bits(run_layer_on_gpu(layer_case));
      ASSERT_EQ(got.size(), wanted.size());
      EXPECT_EQ(reference::compare(got, wanted).num_different, 0)
          << name_of(dtype) << ", " << strategy;
    }
  }
}

TEST_F(CudaShards, HaveTheSameBitsWithoutOverlapAndRecomputed) {
  LayerCase layer_case = sharded_case(DType::kBF16, 2, {0, 60, 150, 1});
  const std::vector<double> wanted = shared_bits(run_layer_on_gpu(layer_case));
  layer_case.config.overlap_shared = false;
  EXPECT_EQ(shared_bits(run_layer_on_gpu(layer_case)), wanted);
  layer_case.config.experts.recompute = true;
  EXPECT_EQ(shared_bits(run_layer_on_gpu(layer_case)), wanted);
}

TEST_F(CudaShards, LeaveGradientsToBeDelayed) {
  const LayerCase layer_case = sharded_case(DType::kBF16, 2, {100, 111});
  const std::vector<RankResult> wanted = run_layer_on_gpu(layer_case);
  run_ranks(2, [&](Group& group) {
    LayerOnGpu gpu(group, layer_case);
    MoeForwardResult first = gpu.rank.forward();
    MoeForwardArgs again = gpu.rank.forward_args();
    again.decision = &first.saved.decision;
    MoeForwardResult second = gpu.rank.layer.forward(again);
    for (MoeForwardResult* forward : {&second, &first}) {
      const RankResult got = gpu.backward_with_delayed_dw(*forward);
      EXPECT_EQ(find_difference(got, wanted[static_cast<size_t>(group.rank())], 0.0), "");
    }
  });
}

TEST_F(CudaShards, WriteTheResultsIntoGivenMemory) {
  const LayerCase layer_case = sharded_case(DType::kBF16, 2, {100, 111});
  const std::vector<RankResult> wanted = run_layer_on_gpu(layer_case);
  run_ranks(2, [&](Group& group) {
    LayerOnGpu gpu(group, layer_case);
    const Shape shape = gpu.rank.tokens.x.view.shape;
    const OwnedTensor out = device_tensor(DType::kBF16, shape, gpu.stream);
    const OwnedTensor grad_x = device_tensor(DType::kBF16, shape, gpu.stream);
    MoeForwardArgs forward = gpu.rank.forward_args();
    forward.out = out.view;
    MoeForwardResult result = gpu.rank.layer.forward(forward);
    EXPECT_EQ(result.out.view.data, out.view.data);
    MoeBackwardArgs backward = gpu.rank.backward_args(result.saved);
    backward.grad_x = grad_x.view;
    const OwnedTensor returned = gpu.rank.layer.backward(backward);
    EXPECT_EQ(returned.view.data, grad_x.view.data);
    const RankResult got = gpu.result(result, returned);
    EXPECT_EQ(find_difference(got, wanted[static_cast<size_t>(group.rank())], 0.0), "");
  });
}

// Router, capacity and losses see whole experts.
TEST_F(CudaShards, ChangeNeitherDropsNorLoads) {
  for (const DropPolicy policy : {DropPolicy::kPosition, DropPolicy::kWeight}) {
    LayerCase layer_case = sharded_case(DType::kF32, 2, {0, 60, 150, 1});
    layer_case.config.dispatch.capacity = Capacity{.factor = 0.5, .policy = policy};
    expect_reference(layer_case, kTolerance, "capacity");
    LayerCase whole_case = layer_case;
    whole_case.config.etp = 1;
    std::vector<MoeDecision> whole(4);
    run_ranks(4, [&](Group& group) {
      LayerOnRank rank(group, whole_case);
      whole[static_cast<size_t>(group.rank())] = rank.forward().saved.decision;
    });
    run_ranks(4, [&](Group& group) {
      LayerOnGpu gpu(group, layer_case);
      const MoeForwardResult forward = gpu.rank.forward();
      const MoeDecision decision = forward.saved.decision.on_host(gpu.stream.view());
      EXPECT_EQ(decision.dropped, whole[static_cast<size_t>(group.rank())].dropped);
      EXPECT_EQ(decision.load, whole[static_cast<size_t>(group.rank())].load);
    });
    EXPECT_THAT(whole[2].dropped, ::testing::Contains(::testing::Gt(0)));
  }
}

// An expert that maps x_0 to x_0^2 (1 + 2^-10) with its first shard and to -x_0^2 with its second.
// The first partial result of x_0 = 1 is not representable in bf16; nor is its gradient, 2 + 2^-9.
struct CancellingShard {
  OwnedTensor w1;  // [1, f, D]
  OwnedTensor w2;  // [1, D, f]

  CancellingShard(bool is_first, int64_t f, int64_t D, const RankStream& stream) {
    std::vector<double> in(static_cast<size_t>(f * D));
    std::vector<double> out(static_cast<size_t>(D * f));
    in[0] = 1.0;
    out[0] = is_first ? 1.0 : -1.0;
    if (is_first) {
      in[static_cast<size_t>(D)] = 1.0 / 32;
      out[1] = 1.0;
    }
    const OwnedTensor host_w1 = reference::to_tensor(DType::kBF16, {1, f, D}, in);
    const OwnedTensor host_w2 = reference::to_tensor(DType::kBF16, {1, D, f}, out);
    w1 = to_device(host_w1.view, stream);
    w2 = to_device(host_w2.view, stream);
    stream.synchronize();
  }
};

// With widths that are multiples of 8, the fastest kernels compute.
TEST_F(CudaShards, PartialResultsAndGradientsAreNotRounded) {
  for (const int64_t width : {2, 8}) {
    MoeLayerConfig config;
    config.router.num_experts = 1;
    config.router.top_k = 1;
    config.router.width = width;
    config.experts.inner = 2 * width;
    config.experts.activation = Activation::kSquaredRelu;
    config.experts.dtype = DType::kBF16;
    config.etp = 2;
    run_ranks(2, [&](Group& group) {
      const RankStream stream(group);
      const auto on_gpu = [&](const Shape& shape) {  // 1 in the first column
        std::vector<double> values(static_cast<size_t>(shape.num_elements()));
        if (!values.empty()) values[0] = 1.0;
        const OwnedTensor host = reference::to_tensor(DType::kBF16, shape, values);
        OwnedTensor copy = to_device(host.view, stream);
        stream.synchronize();
        return copy;
      };
      const int64_t T = group.rank() == 0 ? 1 : 0;
      const CancellingShard shard(group.rank() == 0, width, width, stream);
      const OwnedTensor gate = on_gpu({1, width});
      const OwnedTensor x = on_gpu({T, width});
      const OwnedTensor grad_out = on_gpu({T, width});
      const MoeLayerWeights weights{.gate = {.weight = gate.view},
                                    .experts = {.w1 = shard.w1.view, .w2 = shard.w2.view}};
      MoeLayerOptions options;
      options.device.stream = stream.view();
      MoeLayer layer(group, config, std::move(options));
      MoeForwardResult result = layer.forward({.weights = weights, .x = x.view});
      const OwnedTensor grad_x = layer.backward(
          {.weights = weights, .x = x.view, .grad_out = grad_out.view, .saved = &result.saved});
      std::vector<double> wanted(static_cast<size_t>(T * width));
      if (T > 0) wanted[0] = 1.0 / 1024;
      EXPECT_EQ(values_of(result.out.view, stream), wanted);
      if (T > 0) wanted[0] = 1.0 / 512;
      EXPECT_EQ(values_of(grad_x.view, stream), wanted);
    });
  }
}

TEST_F(CudaShards, HaveTheRoutesOfTheCpu) {
  const RankStream stream;
  for (const int64_t T : {0, 1, 1000}) {
    constexpr int64_t kSlots = 3;
    std::vector<int32_t> ids(static_cast<size_t>(T * kSlots));
    std::vector<float> weights(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) {
      ids[i] = static_cast<int32_t>(i * 7 % 11) - 1;
      weights[i] = static_cast<float>(i) / 8;
    }
    if (T > 1) ids[5] = std::numeric_limits<int32_t>::max();  // stays out of range
    const Routing host{.expert_ids = {ids.data(), {T, kSlots}},
                       .weights = {weights.data(), {T, kSlots}}};
    const OwnedTensor device_ids = to_device(host.expert_ids, stream);
    const OwnedTensor device_weights = to_device(host.weights, stream);
    for (const int64_t etp : {2, 4, 5}) {
      const ShardedRoutes wanted = shard_routes(host, etp);
      const Shape shape{T, kSlots * etp};
      const ShardedRoutes got{.expert_ids = device_tensor(DType::kI32, shape, stream),
                              .weights = device_tensor(DType::kF32, shape, stream)};
      shard_routes_on_device({.expert_ids = device_ids.view, .weights = device_weights.view}, got,
                             stream.view());
      EXPECT_EQ(values_of(got.expert_ids.view, stream), reference::to_values(wanted.expert_ids));
      EXPECT_EQ(values_of(got.weights.view, stream), reference::to_values(wanted.weights));
    }
  }
}

// Terms of very different size, so that the order of the sum is visible.
TEST_F(CudaShards, AreSummedInTheOrderOfTheCpu) {
  const RankStream stream;
  for (const int64_t T : {0, 1, 777}) {
    const Shape shape{T, 2 * 4};
    std::vector<float> values(static_cast<size_t>(shape.num_elements()));
    for (size_t i = 0; i < values.size(); ++i) {
      const float magnitude = i % 3 == 0 ? 1e8F : 1.0F;
      values[i] = (i % 5 < 2 ? -1.0F : 1.0F) * (magnitude + static_cast<float>(i) / 64);
    }
    std::vector<float> wanted(static_cast<size_t>(T * 2));
    const ConstTensorView host(values.data(), shape);
    sum_over_shards(host, TensorView(wanted.data(), {T, 2}));
    const OwnedTensor from = to_device(host, stream);
    const OwnedTensor sums = device_tensor(DType::kF32, {T, 2}, stream);
    sum_over_shards_on_device(from.view, sums.view, stream.view());
    EXPECT_EQ(values_of(sums.view, stream), std::vector<double>(wanted.begin(), wanted.end()));
  }
}

// Ties, denormals and overflow; with and without vectors of four.
TEST_F(CudaShards, SumsAreRoundedAsOnTheCpu) {
  const RankStream stream;
  std::vector<float> sums;
  for (int i = 0; i < 5001; ++i) {
    const float sign = i % 2 == 0 ? 1.0F : -1.0F;
    sums.push_back(sign * std::ldexp(1.0F + static_cast<float>(i % 512) / 512, i % 280 - 149));
  }
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const int64_t count : {0, 1, 4096, 5001}) {
      const Shape shape{1, count};
      const ConstTensorView host(sums.data(), shape);
      const OwnedTensor wanted =
          reference::to_tensor(dtype, shape, std::vector<double>(static_cast<size_t>(count)));
      round_sums(host, wanted.view, *ThreadPool::process_wide());
      const OwnedTensor from = to_device(host, stream);
      const OwnedTensor got = device_tensor(dtype, shape, stream);
      round_sums(from.view, got.view, *ThreadPool::process_wide(), stream.view());
      EXPECT_EQ(to_host(got.view, stream), bytes_of(wanted.view)) << name_of(dtype) << " " << count;
    }
  }
}

}  // namespace
}  // namespace crossdock
