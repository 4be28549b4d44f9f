#include <gtest/gtest.h>

#include "comm/cuda/gpu_reach.hpp"

namespace crossdock::cuda {
namespace {

constexpr MemoryKind kKinds[] = {MemoryKind::kPlain, MemoryKind::kCommon, MemoryKind::kGranted};

TEST(MemoryReach, RanksOnOneDeviceNeedNoCopy) {
  const PeerDevice peers[] = {{.device = 3}, {.device = 3}};
  for (const MemoryKind kind : kKinds) EXPECT_FALSE(needs_copy(3, kind, peers));
}

TEST(MemoryReach, OtherDevicesNeedACopyOfMemoryThatIsReachedByGrantOnly) {
  const PeerDevice peers[] = {{.device = 0}, {.device = 1}};
  EXPECT_FALSE(needs_copy(0, MemoryKind::kPlain, peers));
  EXPECT_FALSE(needs_copy(0, MemoryKind::kCommon, peers));
  EXPECT_TRUE(needs_copy(0, MemoryKind::kGranted, peers));
}

TEST(MemoryReach, ACopyIsNeededUnlessAllOtherDevicesHaveAccess) {
  const PeerDevice some[] = {{.device = 0}, {.device = 1, .has_access = true}, {.device = 2}};
  const PeerDevice all[] = {
      {.device = 0}, {.device = 1, .has_access = true}, {.device = 2, .has_access = true}};
  EXPECT_TRUE(needs_copy(0, MemoryKind::kGranted, some));
  EXPECT_FALSE(needs_copy(0, MemoryKind::kGranted, all));
}

TEST(MemoryReach, ARankAloneNeedsNoCopy) {
  for (const MemoryKind kind : kKinds) EXPECT_FALSE(needs_copy(0, kind, {}));
}

}  // namespace
}  // namespace crossdock::cuda
