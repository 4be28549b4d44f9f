#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "crossdock/testing/reference.hpp"
#include "support/slope.hpp"

namespace crossdock::reference {
namespace {

using testing::Each;

// Two ranks, five experts, a masked token, an absent route, drops and unaligned counts.
LayerInput small_layer(bool weights_in_experts, bool with_experts) {
  std::mt19937 random(3);
  std::uniform_real_distribution<double> value(-1.0, 1.0);
  const auto values = [&](size_t count) {
    std::vector<double> made(count);
    for (double& v : made) v = value(random);
    return made;
  };
  LayerInput input;
  input.config = {.num_experts = 5, .top_k = 2, .width = 3, .alignment = 8};
  input.config.capacity = Capacity{.factor = 1.0, .policy = DropPolicy::kPosition};
  input.weights_in_experts = weights_in_experts;
  input.mlp = {.D = 3, .F = 2, .activation = Activation::kSwiglu};
  for (int e = 0; with_experts && e < 5; ++e) {
    input.experts.push_back({values(12), values(6), values(4), values(3)});
  }
  const std::vector<std::vector<int64_t>> ids = {{0, 4, 0, 1, 0, 3, 2, -1}, {0, 1, 3, 4, 1, 3}};
  for (const auto& rank_ids : ids) {
    RankInput rank;
    rank.T = static_cast<int64_t>(rank_ids.size()) / 2;
    rank.expert_ids = rank_ids;
    rank.weights = values(rank_ids.size());
    rank.x = values(static_cast<size_t>(rank.T) * 3);
    rank.grad_out = values(static_cast<size_t>(rank.T) * 3);
    input.ranks.push_back(std::move(rank));
  }
  input.ranks[1].mask = {0, 1, 0};
  input.ranks[0].weights[7] = std::numeric_limits<double>::quiet_NaN();  // no route: ignored
  return input;
}

double loss_of(const LayerInput& input) {
  const LayerOutput output = run_layer(input);
  double loss = 0.0;
  for (size_t r = 0; r < input.ranks.size(); ++r) {
    for (size_t i = 0; i < output.out[r].size(); ++i) {
      loss += output.out[r][i] * input.ranks[r].grad_out[i];
    }
  }
  return loss;
}

void expect_slopes(LayerInput& input, std::vector<double>& values, const std::vector<double>& grads,
                   const char* name) {
  ASSERT_EQ(values.size(), grads.size()) << name;
  for (size_t i = 0; i < values.size(); ++i) {
    const double slope = slope_of(values[i], 1e-5, [&] { return loss_of(input); });
    EXPECT_NEAR(grads[i], slope, 1e-7) << name << " " << i;
  }
}

class ReferenceLayer : public testing::TestWithParam<std::tuple<bool, bool>> {};

TEST_P(ReferenceLayer, GradientsAreTheDifferencesOfTheForward) {
  LayerInput input = small_layer(std::get<0>(GetParam()), std::get<1>(GetParam()));
  const LayerOutput output = run_layer(input);
  EXPECT_GT(output.dropped[0], 0);
  for (size_t r = 0; r < input.ranks.size(); ++r) {
    expect_slopes(input, input.ranks[r].x, output.grad_x[r], "x");
    expect_slopes(input, input.ranks[r].weights, output.grad_weights[r], "weights");
  }
  for (size_t e = 0; e < input.experts.size(); ++e) {
    expect_slopes(input, input.experts[e].w1, output.expert_grads[e].w1, "w1");
    expect_slopes(input, input.experts[e].w2, output.expert_grads[e].w2, "w2");
    expect_slopes(input, input.experts[e].b1, output.expert_grads[e].b1, "b1");
    expect_slopes(input, input.experts[e].b2, output.expert_grads[e].b2, "b2");
  }
}

INSTANTIATE_TEST_SUITE_P(WeightsAndExperts, ReferenceLayer,
                         testing::Combine(testing::Bool(), testing::Bool()));

TEST(ReferenceLayerTranspose, DispatchAndUnweightedCombineAreTransposes) {
  const LayerInput input = small_layer(false, false);
  const Layout layout = lay_out(input.config, input.ranks);
  PerRank x;
  for (const RankInput& rank : input.ranks) x.push_back(rank.x);
  const PerRank rows = dispatch(layout, 3, x);
  PerRank y = rows;
  for (auto& values : y) {
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i % 7) - 3.0;
  }
  const PerRank back = combine(layout, 3, y);
  double left = 0.0;
  double right = 0.0;
  for (size_t r = 0; r < 2; ++r) {
    for (size_t i = 0; i < rows[r].size(); ++i) left += rows[r][i] * y[r][i];
    for (size_t i = 0; i < x[r].size(); ++i) right += x[r][i] * back[r][i];
  }
  EXPECT_NEAR(left, right, 1e-12);
}

TEST(ReferenceLayerWithoutTokens, GivesZeroGradientsToEveryExpert) {
  LayerInput input = small_layer(false, true);
  for (RankInput& rank : input.ranks) rank = RankInput{};
  const LayerOutput output = run_layer(input);
  EXPECT_TRUE(output.out[0].empty());
  for (const MlpWeights& grads : output.expert_grads) EXPECT_THAT(grads.w1, Each(0.0));
}

}  // namespace
}  // namespace crossdock::reference
