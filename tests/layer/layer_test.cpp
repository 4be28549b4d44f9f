#include <gtest/gtest.h>

#include <cmath>

#include "layer/layer_cases.hpp"

namespace crossdock {
namespace {

constexpr double kTolerance = 1e-11;

void expect_reference(const NamedCase& named, const ThreadOptions& options = {}) {
  for (const std::string& strategy : strategy_names()) {
    LayerCase layer_case = make_case(named.options);
    layer_case.config.strategy = strategy;
    const std::vector<RankResult> wanted = run_reference(layer_case);
    const std::vector<RankResult> got = run_layer_on_threads(layer_case, options);
    for (size_t rank = 0; rank < got.size(); ++rank) {
      EXPECT_EQ(find_difference(got[rank], wanted[rank], kTolerance), "")
          << named.name << ", " << strategy << ", rank " << rank << " of " << got.size();
    }
  }
}

TEST(MoeLayer, EqualsTheReferenceForwardAndBackward) {
  for (const int P : {1, 2, 4, 7}) {
    for (const NamedCase& named : list_layer_cases(P)) expect_reference(named);
  }
}

TEST(MoeLayer, EqualsTheReferenceOnSeveralNodes) {
  for (const NamedCase& named : list_layer_cases(4)) expect_reference(named, {.ranks_per_node = 2});
}

TEST(MoeLayer, WorksWithoutAnyToken) {
  NamedCase named = list_layer_cases(3)[2];
  named.options.tokens_per_rank.assign(3, 0);
  expect_reference(named);
}

// The sum that backward differentiates: <grad_out, out> of all ranks, and all losses.
double objective(const LayerCase& layer_case) {
  double sum = 0.0;
  size_t i = 0;
  for (const RankResult& rank : run_layer_on_threads(layer_case)) {
    for (const double value : rank.out) sum += value * layer_case.grad_out[i++];
    sum += rank.losses.aux + rank.losses.z;
  }
  return sum;
}

double sum_of(const std::vector<RankResult>& ranks, std::vector<double> RankResult::*member,
              size_t index) {
  double sum = 0.0;
  for (const RankResult& rank : ranks) sum += (rank.*member)[index];
  return sum;
}

// Central differences of the whole layer, through the library alone.
TEST(MoeLayer, GradientsAreTheSlopesOfOutputsAndLosses) {
  NamedCase named = list_layer_cases(3)[2];
  named.options.config.dispatch.alignment = 1;
  LayerCase layer_case = make_case(named.options);
  const std::vector<RankResult> ranks = run_layer_on_threads(layer_case);
  const auto slope = [&](double& value) {
    constexpr double kStep = 1e-6;
    const double before = value;
    value = before + kStep;
    const double above = objective(layer_case);
    value = before - kStep;
    const double below = objective(layer_case);
    value = before;
    return (above - below) / (2 * kStep);
  };
  for (const size_t i : {0UL, 13UL, 31UL}) {
    EXPECT_NEAR(slope(layer_case.gate[i]), sum_of(ranks, &RankResult::grad_gate, i), 1e-6) << i;
    EXPECT_NEAR(slope(layer_case.x[i]), ranks[0].grad_x[i], 1e-6) << i;
  }
  EXPECT_NEAR(slope(layer_case.gate_bias[3]), sum_of(ranks, &RankResult::grad_gate_bias, 3), 1e-6);
  for (size_t e = 0; e < layer_case.experts.size(); ++e) {
    double w1 = 0.0;
    double b2 = 0.0;
    for (const RankResult& rank : ranks) {
      if (rank.experts[e].w1.empty()) continue;
      w1 += rank.experts[e].w1[5];
      b2 += rank.experts[e].b2[2];
    }
    EXPECT_NEAR(slope(layer_case.experts[e].w1[5]), w1, 1e-6) << "expert " << e;
    EXPECT_NEAR(slope(layer_case.experts[e].b2[2]), b2, 1e-6) << "expert " << e;
  }
  double shared_w2 = 0.0;
  for (const RankResult& rank : ranks) shared_w2 += rank.shared.w2[9];
  EXPECT_NEAR(slope(layer_case.shared.w2[9]), shared_w2, 1e-6);
}

LayerCase large_case(DType dtype) {
  MoeLayerConfig config;
  config.router.num_experts = 12;
  config.router.top_k = 3;
  config.router.width = 72;
  config.experts.inner = 40;
  config.experts.dtype = dtype;
  config.shared_inner = 24;
  config.router.score = Score::kSigmoid;
  return make_case({.config = config, .tokens_per_rank = {211}, .biases = true, .mask = true});
}

TEST(MoeLayer, BitsDependNeitherOnRanksNorOnStrategy) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const WeightsIn place : {WeightsIn::kCombine, WeightsIn::kExperts}) {
      LayerCase alone = large_case(dtype);
      alone.config.experts.weights_in = place;
      const std::vector<double> wanted = shared_bits(run_layer_on_threads(alone));
      for (const std::vector<int64_t>& tokens : std::vector<std::vector<int64_t>>{
               {100, 111}, {0, 60, 150, 1}, {30, 31, 0, 50, 40, 59, 1}}) {
        LayerCase spread_case = spread(alone, tokens);
        for (const std::string& strategy : strategy_names()) {
          spread_case.config.strategy = strategy;
          const std::vector<double> got =
              shared_bits(run_layer_on_threads(spread_case, {.ranks_per_node = 2}));
          ASSERT_EQ(got.size(), wanted.size());
          EXPECT_EQ(reference::compare(got, wanted).num_different, 0)
              << name_of(dtype) << ", " << strategy << ", " << tokens.size() << " ranks";
        }
      }
    }
  }
}

TEST(MoeLayer, BitsDependNeitherOnOverlapNorOnThreads) {
  LayerCase layer_case = spread(large_case(DType::kF32), {100, 111});
  const std::vector<double> wanted = shared_bits(run_layer_on_threads(layer_case));
  layer_case.config.overlap_shared = false;
  EXPECT_EQ(shared_bits(run_layer_on_threads(layer_case)), wanted);
  std::vector<RankResult> results(2);
  const auto pool = std::make_shared<ThreadPool>(1);
  run_ranks(2, [&](Group& group) {
    results[static_cast<size_t>(group.rank())] =
        run_layer(group, layer_case, {.strategy = nullptr, .pool = pool});
  });
  EXPECT_EQ(shared_bits(results), wanted);
}

}  // namespace
}  // namespace crossdock
