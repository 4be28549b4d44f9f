#include "crossdock/experts.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include "experts/expert_case.hpp"
#include "support/slope.hpp"

namespace crossdock {
namespace {

using Form = std::tuple<Activation, DType, WeightsIn>;

class EveryForm : public ::testing::TestWithParam<Form> {};

TEST_P(EveryForm, MatchesTheReferenceWithEmptyExpertsPadRowsAndTail) {
  const auto [activation, dtype, weights_in] = GetParam();
  for (const bool with_bias : {false, true}) {
    for (const bool interleaved : {false, true}) {
      if (interleaved && !is_gated(activation)) continue;
      for (const bool recompute : {false, true}) {
        const ExpertsConfig config{.width = 24,
                                   .inner = 20,
                                   .activation = activation,
                                   .interleaved = interleaved,
                                   .limit = kLimit,
                                   .weights_in = weights_in,
                                   .dtype = dtype,
                                   .recompute = recompute};
        const ExpertCase test(config, {3, 0, 9, 1, 0}, with_bias);
        SCOPED_TRACE(testing::Message() << "bias " << with_bias << " interleaved " << interleaved
                                        << " recompute " << recompute);
        const ExpertResult got = run_experts(test);
        const ExpertResult wanted = run_reference(test);
        expect_close(got, wanted, tolerance(dtype));
        if (with_bias) {
          expect_close("grad_b1", got.b1, wanted.b1, tolerance(dtype));
          expect_close("grad_b2", got.b2, wanted.b2, tolerance(dtype));
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, EveryForm,
    ::testing::Combine(::testing::Values(Activation::kSwiglu, Activation::kClampedSwiglu,
                                         Activation::kGeglu, Activation::kGelu,
                                         Activation::kGeluTanh, Activation::kSquaredRelu,
                                         Activation::kGegluTanh, Activation::kLimitedSwiglu),
                       ::testing::Values(DType::kF64, DType::kF32, DType::kBF16, DType::kF16),
                       ::testing::Values(WeightsIn::kCombine, WeightsIn::kExperts)),
    [](const auto& info) {
      return std::string(name_of(std::get<0>(info.param))) + "_" +
             std::string(name_of(std::get<1>(info.param))) +
             (std::get<2>(info.param) == WeightsIn::kCombine ? "_combine" : "_experts");
    });

// matrices [count, height, width] -> [count, width, height]
std::vector<double> transposed(const std::vector<double>& matrices, int64_t height, int64_t width) {
  std::vector<double> result;
  for (size_t first = 0; first < matrices.size(); first += static_cast<size_t>(height * width)) {
    for (int64_t column = 0; column < width; ++column) {
      for (int64_t row = 0; row < height; ++row) {
        result.push_back(matrices[first + static_cast<size_t>(row * width + column)]);
      }
    }
  }
  return result;
}

TEST(Experts, TransposedWeightsGiveTheSameBits) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    for (const Activation activation : {Activation::kClampedSwiglu, Activation::kGelu}) {
      const ExpertsConfig config{.width = 24,
                                 .inner = 20,
                                 .activation = activation,
                                 .interleaved = is_gated(activation),
                                 .limit = kLimit,
                                 .dtype = dtype};
      const int64_t hidden = config.hidden_width();
      ExpertCase test(config, {3, 0, 40, 1}, true);
      ExpertResult wanted = run_experts(test);
      wanted.w1 = transposed(wanted.w1, hidden, config.width);
      wanted.w2 = transposed(wanted.w2, config.width, config.inner);
      test.config.transposed = true;
      for (reference::MlpWeights& expert : test.experts) {
        expert.w1 = transposed(expert.w1, hidden, config.width);
        expert.w2 = transposed(expert.w2, config.width, config.inner);
      }
      EXPECT_EQ(run_experts(test), wanted) << name_of(dtype) << " " << name_of(activation);
    }
  }
}

ExpertsConfig small_config(DType dtype) {
  return {.width = 16, .inner = 8, .dtype = dtype};
}

TEST(Experts, WorkWithoutRowsAndWithoutExperts) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    const ExpertResult none = run_experts(ExpertCase(small_config(dtype), {0, 0}, true, 1, 0));
    EXPECT_TRUE(none.y.empty());
    EXPECT_THAT(none.w1, testing::Each(0.0));
    EXPECT_THAT(none.b2, testing::Each(0.0));
    const ExpertResult tail = run_experts(ExpertCase(small_config(dtype), {}, true, 1, 2));
    EXPECT_THAT(tail.y, testing::Each(0.0));
    EXPECT_THAT(tail.grad_rows, testing::Each(0.0));
    EXPECT_THAT(tail.grad_row_weights, testing::Each(0.0));
  }
}

TEST(Experts, AccumulationAddsAndLeavesExpertsWithoutRowsAlone) {
  const ExpertCase test(small_config(DType::kF64), {2, 0, 3}, true);
  const ExpertResult fresh = run_experts(test);
  const ExpertResult added =
      run_experts(test, {.pool = nullptr, .accumulate = true, .initial_gradient = 0.25});
  const auto check = [](const std::vector<double>& sum, const std::vector<double>& part) {
    for (size_t i = 0; i < sum.size(); ++i) ASSERT_EQ(sum[i], 0.25 + part[i]);
  };
  check(added.w1, fresh.w1);
  check(added.w2, fresh.w2);
  check(added.b1, fresh.b1);
  check(added.b2, fresh.b2);
  // Untouched: a -0 of an expert without rows remains; adding +0 would make it +0.
  const ExpertResult negative =
      run_experts(test, {.pool = nullptr, .accumulate = true, .initial_gradient = -0.0});
  for (const auto* grad : {&negative.w1, &negative.w2, &negative.b1, &negative.b2}) {
    const size_t per_expert = grad->size() / 3;
    for (size_t i = per_expert; i < 2 * per_expert; ++i) ASSERT_TRUE(std::signbit((*grad)[i]));
  }
}

TEST(Experts, RaggedWeightGradientsOverwriteNotANumberAndAreZeroForEmptyExperts) {
  const ExpertsConfig config{.width = 12, .inner = 6};
  const ExpertCase test(config, {162, 0, 2577, 446, 0, 83}, true, 1, 0);
  const ExpertResult got = run_experts(test);
  const ExpertResult wanted = run_reference(test);
  expect_close(got, wanted, 1e-5);
  const auto expect_empty = [&](const std::vector<double>& grad, size_t expert) {
    const size_t size = grad.size() / 6;
    for (size_t i = 0; i < size; ++i) ASSERT_EQ(grad[expert * size + i], 0.0);
  };
  for (const size_t expert : {1, 4}) {
    expect_empty(got.w1, expert);
    expect_empty(got.w2, expert);
    expect_empty(got.b1, expert);
    expect_empty(got.b2, expert);
  }
}

TEST(Experts, BiasIsScaledByTheRowsWeight) {
  const int64_t D = 3;
  const ExpertsConfig config{.width = D, .inner = 2, .weights_in = WeightsIn::kExperts};
  ExpertCase test(config, {2, 1}, true, 1, 0);
  for (size_t e = 0; e < 2; ++e) {
    auto& expert = test.experts[e];
    for (auto* values : {&expert.w1, &expert.w2, &expert.b1}) {
      std::fill(values->begin(), values->end(), 0.0);
    }
    std::fill(expert.b2.begin(), expert.b2.end(), e == 0 ? 2.0 : 4.0);
  }
  test.row_weights = {0.25, 0.5, 0.125};
  std::fill(test.grad_y.begin(), test.grad_y.end(), 1.0);
  const ExpertResult got = run_experts(test);
  EXPECT_THAT(got.y, testing::ElementsAre(.5, .5, .5, 1., 1., 1., .5, .5, .5));
  EXPECT_THAT(got.grad_row_weights, testing::ElementsAre(2. * D, 2. * D, 4. * D));
  EXPECT_THAT(got.b2, testing::ElementsAre(.75, .75, .75, .125, .125, .125));
}

// Loss = <y, grad_y>. The experts apply the weights, so row weights matter too.
double loss(const ExpertCase& test) {
  const ExpertResult result = run_experts(test);
  double sum = 0.0;
  for (size_t i = 0; i < result.y.size(); ++i) {
    if (!std::isnan(test.grad_y[i])) sum += result.y[i] * test.grad_y[i];
  }
  return sum;
}

void expect_slopes(ExpertCase& test, const char* name, std::vector<double>& values,
                   const std::vector<double>& gradient) {
  ASSERT_EQ(values.size(), gradient.size()) << name;
  for (size_t i = 0; i < values.size(); i += 3) {
    if (std::isnan(values[i])) continue;
    const double slope = slope_of(values[i], 1e-5, [&] { return loss(test); });
    ASSERT_NEAR(gradient[i], slope, 1e-7) << name << " at " << i;
  }
}

TEST(Experts, GradientsAreThoseOfFiniteDifferences) {
  for (const Activation activation : {Activation::kSwiglu, Activation::kGeluTanh}) {
    const ExpertsConfig config{.width = 5,
                               .inner = 4,
                               .activation = activation,
                               .weights_in = WeightsIn::kExperts,
                               .dtype = DType::kF64};
    ExpertCase test(config, {2, 3}, true, 2, 1);
    const ExpertResult result = run_experts(test);
    expect_slopes(test, "rows", test.rows, result.grad_rows);
    expect_slopes(test, "row_weights", test.row_weights, result.grad_row_weights);
    const auto part = [](const std::vector<double>& all, size_t e) {
      const auto size = static_cast<std::ptrdiff_t>(all.size() / 2);
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(e) * size;
      return std::vector<double>(begin, begin + size);
    };
    for (size_t e = 0; e < 2; ++e) {
      expect_slopes(test, "w1", test.experts[e].w1, part(result.w1, e));
      expect_slopes(test, "w2", test.experts[e].w2, part(result.w2, e));
      expect_slopes(test, "b1", test.experts[e].b1, part(result.b1, e));
      expect_slopes(test, "b2", test.experts[e].b2, part(result.b2, e));
    }
  }
}

TEST(Experts, GiveTheSameBitsForEveryNumberOfThreads) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const ExpertsConfig config{.width = 70, .inner = 90, .dtype = dtype};
    const ExpertCase test(config, {300, 0, 17, 1}, true, 8, 2);
    const ExpertResult one = run_experts(test, {.pool = std::make_shared<ThreadPool>(1)});
    for (const int num_threads : {2, 5}) {
      EXPECT_TRUE(one == run_experts(test, {.pool = std::make_shared<ThreadPool>(num_threads)}));
    }
  }
}

// Ten rows of an expert, among its 280 rows and in a segment of their own.
TEST(Experts, ARowsResultDoesNotDependOnItsPlaceOrItsNeighbours) {
  const ExpertsConfig config{.width = 40, .inner = 24};
  const ExpertCase all(config, {280, 5}, true, 1, 0);
  const ExpertResult whole = run_experts(all);
  for (const int64_t first : {0, 13, 255, 270}) {
    ExpertCase part(config, {10, 1}, true, 16, 0);
    part.experts = all.experts;
    const auto take = [&](const std::vector<double>& from, int64_t width, std::vector<double>& to) {
      std::copy_n(from.begin() + first * width, 10 * width, to.begin());
    };
    take(all.rows, 40, part.rows);
    take(all.grad_y, 40, part.grad_y);
    take(all.row_weights, 1, part.row_weights);
    const ExpertResult got = run_experts(part);
    for (int64_t i = 0; i < 10 * 40; ++i) {
      const auto here = static_cast<size_t>(i);
      const auto there = static_cast<size_t>(first * 40 + i);
      ASSERT_EQ(got.y[here], whole.y[there]);
      ASSERT_EQ(got.grad_rows[here], whole.grad_rows[there]);
    }
    for (int64_t i = 0; i < 10; ++i) {
      ASSERT_EQ(got.grad_row_weights[static_cast<size_t>(i)],
                whole.grad_row_weights[static_cast<size_t>(first + i)]);
    }
  }
}

TEST(Experts, AnExpertsWeightGradientDoesNotDependOnTheOtherExpertsHere) {
  const ExpertsConfig config{.width = 20, .inner = 12};
  const ExpertCase both(config, {30, 300}, true, 1, 0);
  ExpertCase alone(config, {300}, true, 64, 0);
  alone.experts = {both.experts[1]};
  std::copy_n(both.rows.begin() + 30 * 20, 300 * 20, alone.rows.begin());
  std::copy_n(both.grad_y.begin() + 30 * 20, 300 * 20, alone.grad_y.begin());
  std::copy_n(both.row_weights.begin() + 30, 300, alone.row_weights.begin());
  const ExpertResult a = run_experts(both);
  const ExpertResult b = run_experts(alone);
  EXPECT_TRUE(
      std::equal(b.w1.begin(), b.w1.end(), a.w1.begin() + static_cast<int64_t>(b.w1.size())));
  EXPECT_TRUE(
      std::equal(b.w2.begin(), b.w2.end(), a.w2.begin() + static_cast<int64_t>(b.w2.size())));
  EXPECT_TRUE(
      std::equal(b.b2.begin(), b.b2.end(), a.b2.begin() + static_cast<int64_t>(b.b2.size())));
}

TEST(Experts, OneSegmentIsADenseMlp) {
  const ExpertsConfig config{.width = 6, .inner = 4, .dtype = DType::kF64};
  const ExpertCase test(config, {5}, false, 1, 0);
  const OneSegment all(5);
  EXPECT_EQ(all.view().num_rows(), 5);
  EXPECT_EQ(all.view().counts[0], 5);
  expect_close(run_experts(test), run_reference(test), 1e-13);
}

TEST(Experts, SaveOnlyTheHiddenRowsAndNothingWithRecompute) {
  for (const bool recompute : {false, true}) {
    for (const bool keep_for_dw : {false, true}) {
      const Experts experts(
          {.num_local_experts = 1, .width = 4, .inner = 3, .recompute = recompute});
      const std::vector<float> x(2 * 4, 1.0F);
      const std::vector<float> w1(6 * 4, 0.5F);
      const std::vector<float> w2(4 * 3, 0.5F);
      const ExpertWeights weights{{w1.data(), {1, 6, 4}}, {w2.data(), {1, 4, 3}}, {}, {}};
      std::vector<float> y(2 * 4);
      std::vector<float> grad_rows(2 * 4);
      const OneSegment all(2);
      ExpertsSaved saved = experts.forward({.weights = weights,
                                            .rows = {x.data(), {2, 4}},
                                            .segments = all.view(),
                                            .row_weights = {},
                                            .y = {y.data(), {2, 4}}});
      EXPECT_EQ(saved.num_bytes(), recompute ? 0 : 2 * 6 * 4);
      experts.backward_dx({.weights = weights,
                           .rows = {x.data(), {2, 4}},
                           .segments = all.view(),
                           .row_weights = {},
                           .grad_y = {y.data(), {2, 4}},
                           .saved = &saved,
                           .grad_rows = {grad_rows.data(), {2, 4}},
                           .grad_row_weights = {},
                           .keep_for_dw = keep_for_dw});
      EXPECT_EQ(saved.num_bytes(), keep_for_dw ? 2 * (6 + 3) * 4 : 0);
    }
  }
}

}  // namespace
}  // namespace crossdock
