#include "ops/sum_rows.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace crossdock::ops {
namespace {

ThreadPool& pool() {
  static ThreadPool three_threads(3);
  return three_threads;
}

template <typename T>
const std::byte* address(const std::vector<T>& row) {
  return reinterpret_cast<const std::byte*>(row.data());
}

template <typename T>
std::byte* address(std::vector<T>& row) {
  return reinterpret_cast<std::byte*>(row.data());
}

TEST(SumRows, AddsInTheOrderGiven) {
  const std::vector<float> large = {1e8F};
  const std::vector<float> small = {1.0F};
  const std::vector<const std::byte*> rows = {address(large), address(small), address(large)};
  const std::vector<float> weights = {1.0F, 1.0F, -1.0F};
  std::vector<float> out = {7.0F};
  sum_rows(
      {.rows = rows.data(), .K = 3, .weights = weights.data(), .out = address(out), .N = 1, .D = 1},
      pool());
  EXPECT_EQ(out[0], 0.0F);  // any other order gives 1
}

TEST(SumRows, RoundsOnceAtTheEndAndFusesProductAndSum) {
  // 1 + 2^-9 is not a bf16 value; only a sum kept in fp32 preserves it.
  const std::vector<BF16> one = {to_bf16(1.0F)};
  const std::vector<BF16> tiny = {to_bf16(0x1p-9F)};
  const std::vector<const std::byte*> rows = {address(one), address(tiny), address(tiny),
                                              address(tiny)};
  std::vector<BF16> out(1);
  sum_rows({.rows = rows.data(),
            .K = 4,
            .out = address(out),
            .N = 1,
            .D = 1,
            .row_dtype = DType::kBF16,
            .out_dtype = DType::kBF16},
           pool());
  EXPECT_EQ(to_float(out[0]), 1.0078125F);  // 1 + 3/512 rounds to 1 + 4/512
  const std::vector<float> row = {1.0F + 0x1p-23F};
  const std::vector<const std::byte*> twice = {address(row), address(row)};
  const std::vector<float> weights = {1.0F + 0x1p-23F, -1.0F};
  std::vector<float> fused(1);
  sum_rows({.rows = twice.data(),
            .K = 2,
            .weights = weights.data(),
            .out = address(fused),
            .N = 1,
            .D = 1},
           pool());
  const float product = (1.0F + 0x1p-23F) * (1.0F + 0x1p-23F);
  EXPECT_EQ(fused[0], std::fma(-1.0F, row[0], product));
}

// Several blocks of work: K rows per sum, or none, one or two, as given by offsets.
TEST(SumRows, ThreadsDoNotChangeTheBits) {
  constexpr int64_t kN = 3000;
  constexpr int64_t kD = 129;
  constexpr int64_t kK = 3;
  std::mt19937 random(5);
  std::vector<float> values(static_cast<size_t>(kN * kK * kD));
  for (float& value : values) value = std::uniform_real_distribution<float>(-1, 1)(random);
  std::vector<float> weights(static_cast<size_t>(kN * kK));
  for (float& weight : weights) weight = std::uniform_real_distribution<float>(0, 1)(random);
  std::vector<const std::byte*> rows;
  for (int64_t row = 0; row < kN * kK; ++row) {
    rows.push_back(reinterpret_cast<const std::byte*>(values.data() + row * kD));
  }
  std::vector<int64_t> offsets = {0};
  for (int64_t n = 0; n < kN; ++n) offsets.push_back(offsets.back() + n % kK);
  ThreadPool alone(1);
  for (const bool with_offsets : {false, true}) {
    const int64_t* some_offsets = with_offsets ? offsets.data() : nullptr;
    std::vector<float> out(static_cast<size_t>(kN * kD), -1.0F);
    std::vector<float> expected(out.size(), -2.0F);
    SumRowsArgs args{.rows = rows.data(),
                     .offsets = some_offsets,
                     .K = kK,
                     .weights = weights.data(),
                     .out = address(out),
                     .N = kN,
                     .D = kD};
    sum_rows(args, pool());
    for (int64_t n = 0; n < kN; ++n) {  // one at a time: no blocks
      const int64_t first = with_offsets ? some_offsets[n] : n * kK;
      const int64_t count = with_offsets ? some_offsets[n + 1] - first : kK;
      sum_rows({.rows = rows.data() + first,
                .K = count,
                .weights = weights.data() + first,
                .out = reinterpret_cast<std::byte*>(expected.data() + n * kD),
                .N = 1,
                .D = kD},
               alone);
    }
    EXPECT_EQ(out, expected);
  }
}

TEST(SumRowsBackward, ThreadsDoNotChangeTheBits) {
  constexpr int64_t kR = 4000;
  constexpr int64_t kD = 130;
  std::mt19937 random(6);
  const auto uniform = [&random](int64_t count) {
    std::vector<double> values(static_cast<size_t>(count));
    for (double& value : values) value = std::uniform_real_distribution<double>(-1, 1)(random);
    return values;
  };
  const std::vector<double> y = uniform(kR * kD);
  const std::vector<double> weights = uniform(kR);
  std::vector<double> grad = uniform(kR * kD);
  std::vector<double> expected = grad;
  std::vector<double> grad_weights(kR);
  std::vector<double> expected_weights(kR);
  sum_rows_backward({.y = address(y),
                     .grad = address(grad),
                     .weights = weights.data(),
                     .grad_weights = grad_weights.data(),
                     .R = kR,
                     .D = kD,
                     .dtype = DType::kF64},
                    pool());
  ThreadPool alone(1);
  for (int64_t r = 0; r < kR; ++r) {
    sum_rows_backward({.y = address(y) + r * kD * 8,
                       .grad = address(expected) + r * kD * 8,
                       .weights = weights.data() + r,
                       .grad_weights = expected_weights.data() + r,
                       .R = 1,
                       .D = kD,
                       .dtype = DType::kF64},
                      alone);
  }
  EXPECT_EQ(grad, expected);
  EXPECT_EQ(grad_weights, expected_weights);
}

TEST(SumRows, TokensWithoutRowsGetPositiveZeros) {
  const std::vector<const std::byte*> rows = {nullptr, nullptr};
  std::vector<double> out = {-5.0, -5.0, -5.0};
  sum_rows({.rows = rows.data(),
            .K = 2,
            .out = address(out),
            .N = 1,
            .D = 3,
            .row_dtype = DType::kF64,
            .out_dtype = DType::kF64},
           pool());
  for (const double value : out) EXPECT_TRUE(value == 0.0 && !std::signbit(value));
}

// The sum of one value, step by step, as the contract defines it.
float expected_sum(const std::vector<std::vector<float>>& rows, const std::vector<float>& weights,
                   size_t begin, size_t end, size_t d) {
  float sum = 0.0F;
  for (size_t j = begin; j < end; ++j) {
    if (!rows[j].empty()) sum = std::fma(weights[j], rows[j][d], sum);
  }
  return sum;
}

class SumRowsOfEveryWidth : public testing::TestWithParam<int64_t> {};

TEST_P(SumRowsOfEveryWidth, HasTheBitsOfThePlainLoop) {
  const auto D = static_cast<size_t>(GetParam());
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const std::vector<int64_t> offsets = {0, 3, 3, 4, 8};
  std::vector<std::vector<float>> rows(8);
  std::vector<const std::byte*> addresses(8, nullptr);
  std::vector<float> weights(8);
  for (size_t j = 0; j < 8; ++j) {
    weights[j] = normal(random);
    if (j == 5) continue;
    for (size_t d = 0; d < D; ++d) rows[j].push_back(normal(random) * 1e3F);
    addresses[j] = address(rows[j]);
  }
  std::vector<float> out(4 * D);
  std::vector<F16> halves(4 * D);
  sum_rows({.rows = addresses.data(),
            .offsets = offsets.data(),
            .weights = weights.data(),
            .out = address(out),
            .N = 4,
            .D = GetParam()},
           pool());
  sum_rows({.rows = addresses.data(),
            .offsets = offsets.data(),
            .weights = weights.data(),
            .out = address(halves),
            .N = 4,
            .D = GetParam(),
            .out_dtype = DType::kF16},
           pool());
  for (size_t n = 0; n < 4; ++n) {
    for (size_t d = 0; d < D; ++d) {
      const float expected = expected_sum(rows, weights, static_cast<size_t>(offsets[n]),
                                          static_cast<size_t>(offsets[n + 1]), d);
      ASSERT_EQ(out[n * D + d], expected) << "n " << n << " d " << d;
      ASSERT_EQ(halves[n * D + d].bits, to_f16(expected).bits);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Widths, SumRowsOfEveryWidth,
                         testing::Values(1, 2, 3, 15, 16, 17, 64, 100, 1023, 1024, 1025, 2880));

// Lane l holds the products l, l + 32, ...; the lanes are added in halves.
float expected_dot(const std::vector<float>& a, const std::vector<float>& b) {
  float lanes[32] = {};
  for (size_t i = 0; i < a.size(); ++i) lanes[i % 32] = std::fma(a[i], b[i], lanes[i % 32]);
  for (size_t half = 16; half > 0; half /= 2) {
    for (size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

TEST(SumRowsBackward, ScalesTheGradientAndTakesTheDotInAFixedOrder) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (const int64_t D : {1, 31, 32, 33, 64, 1000}) {
    std::vector<float> y;
    std::vector<float> grad;
    for (int64_t d = 0; d < D; ++d) {
      y.push_back(normal(random));
      grad.push_back(normal(random));
    }
    const std::vector<float> old = grad;
    const std::vector<float> weights = {0.3F};
    std::vector<float> grad_weights(1);
    sum_rows_backward({.y = address(y),
                       .grad = address(grad),
                       .weights = weights.data(),
                       .grad_weights = grad_weights.data(),
                       .R = 1,
                       .D = D},
                      pool());
    EXPECT_EQ(grad_weights[0], expected_dot(y, old));
    for (size_t d = 0; d < old.size(); ++d) EXPECT_EQ(grad[d], 0.3F * old[d]);
  }
}

TEST(SumRowsBackward, RoundsSmallFloatsOnce) {
  const std::vector<BF16> y = {to_bf16(2.0F), to_bf16(3.0F)};
  std::vector<BF16> grad = {to_bf16(1.0F), to_bf16(-5.0F)};
  const std::vector<float> weights = {1.0F / 3.0F};
  std::vector<float> grad_weights(1);
  sum_rows_backward({.y = address(y),
                     .grad = address(grad),
                     .weights = weights.data(),
                     .grad_weights = grad_weights.data(),
                     .R = 1,
                     .D = 2,
                     .dtype = DType::kBF16},
                    pool());
  EXPECT_EQ(grad_weights[0], -13.0F);
  EXPECT_EQ(grad[0].bits, to_bf16(1.0F / 3.0F).bits);
  EXPECT_EQ(grad[1].bits, to_bf16(-5.0F * (1.0F / 3.0F)).bits);
}

TEST(SumRows, EmptyInputsMayHaveNullPointers) {
  sum_rows({.K = 4, .D = 8}, pool());
  sum_rows_backward({.D = 8}, pool());
}

}  // namespace
}  // namespace crossdock::ops
