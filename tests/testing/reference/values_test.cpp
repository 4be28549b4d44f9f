#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "crossdock/testing/reference.hpp"

namespace crossdock::reference {
namespace {

using testing::ElementsAre;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(ReferenceValues, SurviveEveryDtypeThatHoldsThem) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16, DType::kF8E4M3}) {
    const std::vector<double> values = {0.0, 1.0, -1.75, 448.0, 0.015625, -0.0};
    const OwnedTensor tensor = to_tensor(dtype, {2, 3}, values);
    EXPECT_EQ(compare(to_values(tensor.view), values).num_different, 0) << name_of(dtype);
  }
  for (const DType dtype : {DType::kI64, DType::kI32}) {
    EXPECT_THAT(to_values(to_tensor(dtype, {3}, {0, -1, 7})), ElementsAre(0, -1, 7));
  }
  EXPECT_THAT(to_values(to_tensor(DType::kBool, {2}, {1, 0})), ElementsAre(1, 0));
}

TEST(ReferenceValues, AreRoundedToNearestEven) {
  EXPECT_EQ(round_to(DType::kF32, 1.0 + 0x1p-24), 1.0);
  EXPECT_EQ(round_to(DType::kF32, 1.0 + 3 * 0x1p-24), 1.0 + 0x1p-22);
  EXPECT_EQ(round_to(DType::kBF16, 257.0), 256.0);
  EXPECT_EQ(round_to(DType::kF16, 1e6), kInf);
}

TEST(ReferenceCompare, TakesAnyNanForEqualAndTellsZeroesApart) {
  EXPECT_EQ(compare({kNan, kInf}, {-kNan, kInf}).num_different, 0);
  const Comparison zeros = compare({0.0, 1.0}, {-0.0, 1.0});
  EXPECT_EQ(zeros.num_different, 1);
  EXPECT_EQ(zeros.max_error, 0.0);
  const Comparison different = compare({1.0, 2.0, 3.0}, {1.0, 2.5, kNan});
  EXPECT_EQ(different.num_different, 2);
  EXPECT_EQ(different.first, 1);
  EXPECT_EQ(different.max_error, kInf);
}

}  // namespace
}  // namespace crossdock::reference
