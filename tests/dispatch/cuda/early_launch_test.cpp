// Runs without a GPU.

#include <gtest/gtest.h>

#include "core/cuda/launch.hpp"

namespace crossdock::cuda {
namespace {

TEST(EarlyLaunch, NeedsCodeForTheDeviceThatWaits) {
  const int hopper[] = {900};
  EXPECT_FALSE(waits_in_kernels(hopper, 8));
  EXPECT_TRUE(waits_in_kernels(hopper, 9));
  EXPECT_TRUE(waits_in_kernels(hopper, 12));
  const int ampere[] = {800};  // the driver translates it for later devices
  EXPECT_FALSE(waits_in_kernels(ampere, 8));
  EXPECT_FALSE(waits_in_kernels(ampere, 9));
  const int ampere_and_blackwell[] = {800, 1000};
  EXPECT_FALSE(waits_in_kernels(ampere_and_blackwell, 9));
  EXPECT_TRUE(waits_in_kernels(ampere_and_blackwell, 10));
}

}  // namespace
}  // namespace crossdock::cuda
