#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>

#include "crossdock/testing/reference.hpp"
#include "support/slope.hpp"

namespace crossdock::reference {
namespace {

using testing::Each;
using testing::ElementsAre;

std::vector<double> random_values(std::mt19937& random, size_t count, double scale = 1.0) {
  std::uniform_real_distribution<double> distribution(-scale, scale);
  std::vector<double> values(count);
  for (double& value : values) value = distribution(random);
  return values;
}

MlpWeights random_expert(std::mt19937& random, const MlpConfig& config) {
  const auto height = static_cast<size_t>(is_gated(config.activation) ? 2 * config.F : config.F);
  const auto D = static_cast<size_t>(config.D);
  return {random_values(random, height * D), random_values(random, D * size_t(config.F)),
          random_values(random, height), random_values(random, D)};
}

// The derivative of `loss` with respect to each of `values`, by central differences.
std::vector<double> differences(std::vector<double>& values, const std::function<double()>& loss) {
  std::vector<double> slopes;
  slopes.reserve(values.size());
  for (double& value : values) slopes.push_back(slope_of(value, 1e-5, loss));
  return slopes;
}

void expect_near(const std::vector<double>& got, const std::vector<double>& wanted,
                 const char* name) {
  ASSERT_EQ(got.size(), wanted.size()) << name;
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], wanted[i], 1e-7) << name << " " << i;
}

class ReferenceMlp : public testing::TestWithParam<std::tuple<Activation, bool>> {};

TEST_P(ReferenceMlp, GradientsAreTheDifferencesOfTheForward) {
  const auto [activation, interleaved] = GetParam();
  const MlpConfig config{
      .D = 3, .F = 4, .activation = activation, .interleaved = interleaved, .limit = 1.0};
  std::mt19937 random(7);
  MlpWeights expert = random_expert(random, config);
  std::vector<double> rows = random_values(random, 5 * 3);
  std::vector<double> row_weights = random_values(random, 5);
  const std::vector<double> grad_y = random_values(random, 5 * 3);
  const auto loss = [&] {
    const std::vector<double> y = mlp_forward(config, expert, rows, row_weights);
    double sum = 0.0;
    for (size_t i = 0; i < y.size(); ++i) sum += y[i] * grad_y[i];
    return sum;
  };
  const MlpGradients grads = mlp_backward(config, expert, rows, row_weights, grad_y);
  expect_near(grads.rows, differences(rows, loss), "rows");
  expect_near(grads.row_weights, differences(row_weights, loss), "row_weights");
  expect_near(grads.expert.w1, differences(expert.w1, loss), "w1");
  expect_near(grads.expert.w2, differences(expert.w2, loss), "w2");
  expect_near(grads.expert.b1, differences(expert.b1, loss), "b1");
  expect_near(grads.expert.b2, differences(expert.b2, loss), "b2");
}

INSTANTIATE_TEST_SUITE_P(AllForms, ReferenceMlp,
                         testing::Values(std::tuple(Activation::kSwiglu, false),
                                         std::tuple(Activation::kSwiglu, true),
                                         std::tuple(Activation::kClampedSwiglu, false),
                                         std::tuple(Activation::kClampedSwiglu, true),
                                         std::tuple(Activation::kGeglu, false),
                                         std::tuple(Activation::kGelu, false),
                                         std::tuple(Activation::kGeluTanh, false),
                                         std::tuple(Activation::kSquaredRelu, false),
                                         std::tuple(Activation::kGegluTanh, false),
                                         std::tuple(Activation::kLimitedSwiglu, false),
                                         std::tuple(Activation::kLimitedSwiglu, true)));

// One row x = 1 through matrices of ones, with gate and linear given by the bias.
double activation_of(Activation activation, double gate, double linear) {
  const bool gated = is_gated(activation);
  const MlpConfig config{.D = 1, .F = 1, .activation = activation};
  const MlpWeights expert{std::vector<double>(gated ? 2 : 1, 0.0),
                          {1.0},
                          gated ? std::vector<double>{gate, linear} : std::vector<double>{gate},
                          {}};
  return mlp_forward(config, expert, {1.0})[0];
}

TEST(ReferenceActivation, HasTheKnownValues) {
  EXPECT_NEAR(activation_of(Activation::kSwiglu, 1.0, 2.0), 2.0 * 0.7310585786300049, 1e-12);
  EXPECT_NEAR(activation_of(Activation::kGelu, 1.0, 0.0), 0.8413447460685429, 1e-12);
  EXPECT_NEAR(activation_of(Activation::kGeglu, 1.0, -2.0), -2.0 * 0.8413447460685429, 1e-12);
  EXPECT_NEAR(activation_of(Activation::kGeluTanh, 1.0, 0.0), 0.8411919906082768, 1e-12);
  EXPECT_EQ(activation_of(Activation::kSquaredRelu, 3.0, 0.0), 9.0);
  EXPECT_EQ(activation_of(Activation::kSquaredRelu, -3.0, 0.0), 0.0);
  EXPECT_NEAR(activation_of(Activation::kGegluTanh, 1.0, -2.0), -2.0 * 0.8411919906082768, 1e-12);
  // Beyond the limit of 7, gate and linear are clamped to 7: 7 * sigmoid(11.914) * 8.
  EXPECT_NEAR(activation_of(Activation::kClampedSwiglu, 100.0, 50.0),
              56.0 / (1.0 + std::exp(-11.914)), 1e-12);
  EXPECT_NEAR(activation_of(Activation::kClampedSwiglu, 1.0, -9.0), -6.0 / (1.0 + std::exp(-1.702)),
              1e-12);
  EXPECT_NEAR(activation_of(Activation::kLimitedSwiglu, 100.0, 50.0), 49.0 / (1.0 + std::exp(-7.0)),
              1e-12);
  EXPECT_NEAR(activation_of(Activation::kLimitedSwiglu, 1.0, -9.0), -7.0 * 0.7310585786300049,
              1e-12);
}

TEST(ReferenceMlpWeightsInExperts, ScaleTheSecondBias) {
  // Rows per expert [2, 1], b2 = 2 and 4, weights .25 .5 .125, zero matrices, unit grad_out.
  const MlpConfig config{.D = 2, .F = 1, .activation = Activation::kGelu};
  const auto expert_with = [](double b2) {
    return MlpWeights{{0.0, 0.0}, {0.0, 0.0}, {}, {b2, b2}};
  };
  const std::vector<double> two_rows(4, 1.0);
  const std::vector<double> one_row(2, 1.0);
  EXPECT_THAT(mlp_forward(config, expert_with(2.0), two_rows, {.25, .5}),
              ElementsAre(.5, .5, 1.0, 1.0));
  EXPECT_THAT(mlp_forward(config, expert_with(4.0), one_row, {.125}), Each(.5));
  const MlpGradients first = mlp_backward(config, expert_with(2.0), two_rows, {.25, .5}, two_rows);
  const MlpGradients second = mlp_backward(config, expert_with(4.0), one_row, {.125}, one_row);
  EXPECT_THAT(first.row_weights, Each(2.0 * 2));
  EXPECT_THAT(second.row_weights, Each(4.0 * 2));
  EXPECT_THAT(first.expert.b2, Each(.75));
  EXPECT_THAT(second.expert.b2, Each(.125));
}

TEST(ReferenceMlpWithoutRows, GivesZeroGradients) {
  const MlpConfig config{.D = 2, .F = 3};
  std::mt19937 random(1);
  const MlpGradients grads = mlp_backward(config, random_expert(random, config), {}, {}, {});
  EXPECT_THAT(grads.expert.w1, Each(0.0));
  EXPECT_THAT(grads.expert.w2, Each(0.0));
  EXPECT_EQ(grads.expert.w1.size(), 12U);
}

}  // namespace
}  // namespace crossdock::reference
