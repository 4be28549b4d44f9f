// Experts on a GPU compute the same as experts on the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>

#include "experts/device_tensors.hpp"
#include "support/slope.hpp"

namespace crossdock {
namespace {

// On a GPU activations and W2^T g are rounded to the dtype, on the CPU they are not.
double gpu_tolerance(DType dtype) {
  return dtype == DType::kF32 ? 1e-5 : 2 * tolerance(dtype);
}

void expect_result_of_the_cpu(const ExpertCase& test) {
  const ExpertResult got = run_on_gpu(test);
  const ExpertResult wanted = run_experts(test);
  const double relative = gpu_tolerance(test.config.dtype);
  expect_close(got, wanted, relative);
  expect_close("grad_b1", got.b1, wanted.b1, relative);
  expect_close("grad_b2", got.b2, wanted.b2, relative);
}

using Form = std::tuple<Activation, DType, WeightsIn>;

class CudaExpertsForm : public CudaTest, public ::testing::WithParamInterface<Form> {};

TEST_P(CudaExpertsForm, MatchesTheCpuWithEmptyExpertsPadRowsAndTail) {
  const auto [activation, dtype, weights_in] = GetParam();
  const std::pair<int64_t, int64_t> widths[] = {{24, 20}, {64, 40}, {13, 7}};
  for (const auto& [width, inner] : widths) {
    for (const bool with_bias : {false, true}) {
      for (const bool interleaved : {false, true}) {
        if (interleaved && !is_gated(activation)) continue;
        for (const bool recompute : {false, true}) {
          const ExpertsConfig config{.width = width,
                                     .inner = inner,
                                     .activation = activation,
                                     .interleaved = interleaved,
                                     .limit = kLimit,
                                     .weights_in = weights_in,
                                     .dtype = dtype,
                                     .recompute = recompute};
          SCOPED_TRACE(testing::Message()
                       << "width " << width << " inner " << inner << " bias " << with_bias
                       << " interleaved " << interleaved << " recompute " << recompute);
          expect_result_of_the_cpu(ExpertCase(config, {3, 0, 9, 1, 0}, with_bias));
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, CudaExpertsForm,
    ::testing::Combine(::testing::Values(Activation::kSwiglu, Activation::kClampedSwiglu,
                                         Activation::kGeglu, Activation::kGelu,
                                         Activation::kGeluTanh, Activation::kSquaredRelu,
                                         Activation::kGegluTanh, Activation::kLimitedSwiglu),
                       ::testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                       ::testing::Values(WeightsIn::kCombine, WeightsIn::kExperts)),
    [](const auto& info) {
      return std::string(name_of(std::get<0>(info.param))) + "_" +
             std::string(name_of(std::get<1>(info.param))) +
             (std::get<2>(info.param) == WeightsIn::kCombine ? "_combine" : "_experts");
    });

class CudaExperts : public CudaTest {};

ExpertsConfig config_of(DType dtype, int64_t width = 128, int64_t inner = 64) {
  return {.width = width, .inner = inner, .dtype = dtype};
}

const std::vector<int64_t> kRagged = {162, 0, 2577, 446, 0, 83};

const std::vector<std::vector<int64_t>> kManyCounts = {
    kRagged, {0, 0, 0, 0, 0, 0}, {0, 0, 3268, 0, 0, 0}, {0, 0, 0, 1, 0, 0}};

TEST_F(CudaExperts, MatchTheCpuForRaggedSegments) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const std::vector<int64_t>& counts : kManyCounts) {
      SCOPED_TRACE(testing::Message() << name_of(dtype) << " " << testing::PrintToString(counts));
      expect_result_of_the_cpu(ExpertCase(config_of(dtype), counts, true, 1, 5));
    }
  }
}

TEST_F(CudaExperts, WorkWithoutRowsAndWithoutExperts) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const ExpertResult none = run_on_gpu(ExpertCase(config_of(dtype), {0, 0}, true, 1, 0));
    EXPECT_TRUE(none.y.empty());
    EXPECT_THAT(none.w1, testing::Each(0.0));
    EXPECT_THAT(none.w2, testing::Each(0.0));
    EXPECT_THAT(none.b1, testing::Each(0.0));
    EXPECT_THAT(none.b2, testing::Each(0.0));
    const ExpertResult tail = run_on_gpu(ExpertCase(config_of(dtype), {}, true, 1, 2));
    EXPECT_THAT(tail.y, testing::Each(0.0));
    EXPECT_THAT(tail.grad_rows, testing::Each(0.0));
    EXPECT_THAT(tail.grad_row_weights, testing::Each(0.0));
  }
}

TEST_F(CudaExperts, AccumulationAddsAndLeavesExpertsWithoutRowsAlone) {
  const ExpertCase test(config_of(DType::kBF16), {20, 0, 300}, true);
  const ExpertResult fresh = run_on_gpu(test);
  const ExpertResult added =
      run_on_gpu(test, {.pool = nullptr, .accumulate = true, .initial_gradient = 0.25});
  const ExpertResult negative =
      run_on_gpu(test, {.pool = nullptr, .accumulate = true, .initial_gradient = -0.0});
  for (auto member : {&ExpertResult::w1, &ExpertResult::w2, &ExpertResult::b1, &ExpertResult::b2}) {
    const std::vector<double>& sum = added.*member;
    const std::vector<double>& part = fresh.*member;
    for (size_t i = 0; i < sum.size(); ++i) {
      ASSERT_EQ(sum[i], static_cast<double>(0.25F + static_cast<float>(part[i])));
    }
    const size_t per_expert = sum.size() / 3;
    for (size_t i = per_expert; i < 2 * per_expert; ++i) {
      ASSERT_EQ(part[i], 0.0);
      ASSERT_TRUE(std::signbit((negative.*member)[i]));  // adding +0 would have made it +0
    }
  }
}

TEST_F(CudaExperts, GiveTheSameBitsInEveryRun) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const ExpertCase test(config_of(dtype), kRagged, true, 8, 3);
    const ExpertResult first = run_on_gpu(test);
    for (int again = 0; again < 5; ++again) EXPECT_TRUE(run_on_gpu(test) == first);
  }
}

TEST_F(CudaExperts, RecomputeTheSameBits) {
  for (const Activation activation : {Activation::kSwiglu, Activation::kGelu}) {
    ExpertsConfig config = config_of(DType::kBF16);
    config.activation = activation;
    const ExpertResult kept = run_on_gpu(ExpertCase(config, kRagged, true));
    config.recompute = true;
    EXPECT_TRUE(run_on_gpu(ExpertCase(config, kRagged, true)) == kept);
  }
}

// Rows [first, first + count) of the first expert of a case, as a separate case.
ExpertCase cut_rows(const ExpertCase& from, int64_t first, int64_t count) {
  const int64_t D = from.config.width;
  ExpertCase part(from.config, {count, 1}, from.with_bias, 16, 0);
  part.experts = from.experts;
  const auto take = [&](const std::vector<double>& values, int64_t width, std::vector<double>& to) {
    std::copy_n(values.begin() + first * width, count * width, to.begin());
  };
  take(from.rows, D, part.rows);
  take(from.grad_y, D, part.grad_y);
  take(from.row_weights, 1, part.row_weights);
  return part;
}

TEST_F(CudaExperts, ARowsBitsDoNotDependOnItsPlaceOrItsNeighbours) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    const int64_t D = 128;
    const ExpertCase all(config_of(dtype, D, 64), {4096, 5}, true, 1, 0);
    const ExpertResult whole = run_on_gpu(all);
    for (const auto& [first, count] : {std::pair<int64_t, int64_t>{4095, 1}, {77, 1}, {1000, 17}}) {
      const ExpertResult part = run_on_gpu(cut_rows(all, first, count));
      for (int64_t i = 0; i < count * D; ++i) {
        const auto here = static_cast<size_t>(i);
        const auto there = static_cast<size_t>(first * D + i);
        ASSERT_EQ(part.y[here], whole.y[there]) << name_of(dtype);
        ASSERT_EQ(part.grad_rows[here], whole.grad_rows[there]) << name_of(dtype);
      }
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(part.grad_row_weights[static_cast<size_t>(i)],
                  whole.grad_row_weights[static_cast<size_t>(first + i)]);
      }
    }
  }
}

TEST_F(CudaExperts, ANotANumberStaysInItsRowAndItsExpert) {
  const ExpertCase clean(config_of(DType::kBF16), kRagged, true, 4, 2);
  ExpertCase test = clean;
  const auto D = static_cast<size_t>(test.config.width);
  const auto bad = static_cast<size_t>(test.starts[3]) + 7;  // a row of expert 3
  std::fill_n(test.rows.begin() + static_cast<std::ptrdiff_t>(bad * D), D, kNaN);
  std::fill_n(test.grad_y.begin() + static_cast<std::ptrdiff_t>(bad * D), D, kNaN);
  const ExpertResult wanted = run_on_gpu(clean);
  const ExpertResult got = run_on_gpu(test);
  for (auto member : {&ExpertResult::y, &ExpertResult::grad_rows}) {
    for (size_t i = 0; i < (got.*member).size(); ++i) {
      if (i / D == bad) {
        ASSERT_TRUE(std::isnan((got.*member)[i]));
      } else {
        ASSERT_EQ((got.*member)[i], (wanted.*member)[i]);
      }
    }
  }
  for (auto member : {&ExpertResult::w1, &ExpertResult::w2, &ExpertResult::b1, &ExpertResult::b2}) {
    const size_t per_expert = (got.*member).size() / kRagged.size();
    for (size_t i = 0; i < (got.*member).size(); ++i) {
      if (i / per_expert == 3) continue;
      ASSERT_EQ((got.*member)[i], (wanted.*member)[i]);
    }
  }
}

// Loss = <y, grad_y>. The experts apply the weights, so row weights matter too.
double loss(const ExpertCase& test) {
  const ExpertResult result = run_on_gpu(test);
  double sum = 0.0;
  for (size_t i = 0; i < result.y.size(); ++i) {
    if (!std::isnan(test.grad_y[i])) sum += result.y[i] * test.grad_y[i];
  }
  return sum;
}

void expect_slopes(ExpertCase& test, const char* name, std::vector<double>& values,
                   const double* gradient) {
  for (size_t i = 0; i < values.size(); i += 5) {
    if (std::isnan(values[i])) continue;
    const double slope = slope_of(values[i], 1.0 / 64, [&] { return loss(test); });
    ASSERT_NEAR(gradient[i], slope, 4e-3) << name << " at " << i;
  }
}

TEST_F(CudaExperts, GradientsInFp32AreThoseOfFiniteDifferences) {
  for (const Activation activation : {Activation::kSwiglu, Activation::kGeluTanh}) {
    const ExpertsConfig config{.width = 5,
                               .inner = 4,
                               .activation = activation,
                               .weights_in = WeightsIn::kExperts,
                               .dtype = DType::kF32};
    ExpertCase test(config, {2, 3}, true, 2, 1);
    const ExpertResult result = run_on_gpu(test);
    expect_slopes(test, "rows", test.rows, result.grad_rows.data());
    expect_slopes(test, "row_weights", test.row_weights, result.grad_row_weights.data());
    for (size_t e = 0; e < 2; ++e) {
      reference::MlpWeights& expert = test.experts[e];
      expect_slopes(test, "w1", expert.w1, result.w1.data() + e * expert.w1.size());
      expect_slopes(test, "w2", expert.w2, result.w2.data() + e * expert.w2.size());
      expect_slopes(test, "b1", expert.b1, result.b1.data() + e * expert.b1.size());
      expect_slopes(test, "b2", expert.b2, result.b2.data() + e * expert.b2.size());
    }
  }
}

}  // namespace
}  // namespace crossdock
