// The number of experts that each GPU can plan for.

#include "plan/cuda/plan_limits.hpp"

#include <gtest/gtest.h>

namespace crossdock::cuda {
namespace {

// Maximum shared memory per block (by compute capability).
constexpr int64_t kSm80 = int64_t{163} << 10;
constexpr int64_t kSm89 = int64_t{99} << 10;
constexpr int64_t kSm90 = int64_t{227} << 10;

TEST(PlanLimits, EightThousandExpertsNeedAnH100) {
  EXPECT_TRUE(fits_device_plan(8192, kSm90));
  EXPECT_FALSE(fits_device_plan(8192, kSm80));
  EXPECT_FALSE(fits_device_plan(8192, kSm89));
  EXPECT_FALSE(fits_device_plan(8193, kSm90));
}

TEST(PlanLimits, EveryGpuPlansForFourThousandExperts) {
  for (const int64_t bytes : {kSm80, kSm89, kSm90}) {
    EXPECT_TRUE(fits_device_plan(1, bytes));
    EXPECT_TRUE(fits_device_plan(4000, bytes));
  }
  EXPECT_TRUE(fits_device_plan(6700, kSm80));
  EXPECT_FALSE(fits_device_plan(6900, kSm80));
}

TEST(PlanLimits, TheLastExpertThatFitsIsTakenAndTheNextIsNot) {
  const int64_t bytes = segment_bytes(5000) + kPlanFixedBytes;
  EXPECT_TRUE(fits_device_plan(5000, bytes));
  EXPECT_FALSE(fits_device_plan(5000, bytes - 1));
  EXPECT_FALSE(fits_device_plan(5001, bytes));
}

}  // namespace
}  // namespace crossdock::cuda
