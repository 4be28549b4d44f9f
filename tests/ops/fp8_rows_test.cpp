#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "crossdock/error.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {
namespace {

TEST(Fp8ToBf16, MultipliesEveryValueByTheScaleOfItsGroup) {
  const int64_t D = 300;  // the third group of 128 has 44 values
  std::vector<F8E4M3> rows(2 * D);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = to_f8e4m3(static_cast<float>(i % 16) - 8.0F);
  const std::vector<float> scales = {0.5F, 3.0F, 0x1p-100F, 1.0F, 7.0F, 0.1F};
  std::vector<BF16> out(rows.size());
  fp8_to_bf16({.rows = {rows.data(), {2, D}},
               .scales = {scales.data(), {2, 3}},
               .out = {out.data(), {2, D}}});
  for (int64_t r = 0; r < 2; ++r) {
    for (int64_t d = 0; d < D; ++d) {
      const auto i = static_cast<size_t>(r * D + d);
      const float wanted = to_float(rows[i]) * scales[static_cast<size_t>(r * 3 + d / 128)];
      EXPECT_EQ(out[i].bits, to_bf16(wanted).bits) << "row " << r << " value " << d;
    }
  }
}

TEST(Fp8ToBf16, TakesPowersOfTwoPer32Values) {
  const int64_t D = 40;
  const std::vector<F8E4M3> rows(D, to_f8e4m3(1.5F));
  const std::vector<E8M0> scales = {{127 + 3}, {0xff}};
  std::vector<BF16> out(rows.size());
  fp8_to_bf16({.rows = {rows.data(), {1, D}},
               .scales = {scales.data(), {1, 2}},
               .out = {out.data(), {1, D}}});
  EXPECT_EQ(to_float(out[31]), 12.0F);
  EXPECT_TRUE(std::isnan(to_float(out[32])));
}

TEST(Fp8ToBf16, RefusesScalesOfTheWrongShape) {
  std::vector<BF16> out(128);
  const std::vector<F8E4M3> rows(128);
  const std::vector<float> scales(2);
  try {
    fp8_to_bf16({.rows = {rows.data(), {1, 128}},
                 .scales = {scales.data(), {1, 2}},
                 .out = {out.data(), {1, 128}}});
    FAIL() << "must throw";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "scales must be [1, 1] for rows [1, 128], got [1, 2]");
  }
}

TEST(Fp8ToBf16, RefusesAnOutputThatOverlapsItsRows) {
  std::vector<BF16> memory(64);
  const std::vector<float> scales(1);
  EXPECT_THROW(fp8_to_bf16({.rows = {memory.data(), DType::kF8E4M3, {1, 64}},
                            .scales = {scales.data(), {1, 1}},
                            .out = {memory.data(), {1, 64}}}),
               Error);
}

TEST(Fp8ToBf16, EmptyRowsMayBeNull) {
  fp8_to_bf16({.rows = {nullptr, DType::kF8E4M3, {0, 200}},
               .scales = {nullptr, DType::kF32, {0, 2}},
               .out = {nullptr, DType::kBF16, {0, 200}}});
}

}  // namespace
}  // namespace crossdock
