#include "comm/memory/window.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "crossdock/group.hpp"
#include "support/file_size_limit.hpp"
#include "support/missing_memory.hpp"

namespace crossdock::comm {
namespace {

// One rank of two; nothing is exchanged. Ranks in separate address spaces map memory files, which
// also works within one process.
class StillCommunicator final : public Communicator {
 public:
  StillCommunicator(int rank, bool shares_address_space)
      : rank_(rank), shares_(shares_address_space), topology_(Topology::single_node(2)) {}

  int rank() const override { return rank_; }
  int size() const override { return 2; }
  std::string_view name() const override { return "still"; }
  void all_gather_v(const SharedBytes&, const SharedBytes&, std::span<const int64_t>,
                    const WaitContext&) override {}
  void all_to_all_v(const SharedBytes&, std::span<const int64_t>, const SharedBytes&,
                    std::span<const int64_t>, const WaitContext&) override {}
  std::unique_ptr<Communicator> subgroup(std::span<const int>) override { return nullptr; }
  const Topology& topology() const override { return topology_; }
  bool shares_address_space() const override { return shares_; }
  int64_t max_bytes_in_flight() const override { return 1000; }
  void keep_alive(const std::shared_ptr<const void>& memory) override { kept_.push_back(memory); }

 private:
  int rank_;
  bool shares_;
  Topology topology_;
  std::vector<std::shared_ptr<const void>> kept_;
};

TEST(WindowOfProcesses, ALimitOnFileSizesIsAnError) {
  StillCommunicator communicator(0, /*shares_address_space=*/false);
  WindowPool pool(communicator);
  {
    const test::FileSizeLimit limit(65536);
    EXPECT_NO_THROW(pool.take(65536));
    try {
      pool.take(1 << 20);
      FAIL() << "a window larger than the limit";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCommunication);
      EXPECT_THAT(error.what(), testing::HasSubstr("ulimit -f"));
    }
  }
  EXPECT_EQ(pool.take(1 << 20).num_bytes(), 1 << 20) << "once the limit is raised";
}

class Window : public testing::TestWithParam<bool> {
 protected:
  StillCommunicator owner_rank{0, GetParam()};
  StillCommunicator peer_rank{1, GetParam()};
  WindowPool owner{owner_rank};
  WindowPool peer{peer_rank};

  std::byte* reach(const Buffer& lease) {
    return peer.reach(0, *owner.find(lease.data(), lease.num_bytes()));
  }
};

TEST_P(Window, RefusesWhatNoMemoryCanHold) {
  for (const int64_t num_bytes : {std::numeric_limits<int64_t>::max(), int64_t{1} << 62}) {
    EXPECT_ANY_THROW(owner.take(num_bytes));
  }
  EXPECT_EQ(owner.bytes_held(), 0);
}

TEST_P(Window, APeerReachesWhatTheOwnerHolds) {
  const Buffer lease = owner.take(10000);
  std::memset(lease.data(), 7, 10000);
  std::byte* seen = reach(lease);
  EXPECT_EQ(seen[9999], std::byte{7});
  seen[5000] = std::byte{9};
  EXPECT_EQ(lease.data()[5000], std::byte{9});
}

TEST_P(Window, ForeignMemoryHasNoHandle) {
  std::byte foreign{};
  EXPECT_FALSE(owner.find(&foreign, 1));
  EXPECT_EQ(owner.find(nullptr, 0)->block, 0U);
  const Buffer lease = owner.take(4096);
  EXPECT_TRUE(owner.find(lease.data() + 1, 4095));
  EXPECT_FALSE(owner.find(lease.data() + 1, 4096));
}

TEST_P(Window, ALargeBlockIsNotWastedOnASmallLease) {
  owner.take(10 * 4096);
  owner.take(4096);
  EXPECT_EQ(owner.bytes_held(), 11 * 4096);
}

TEST_P(Window, ALeaseForWhichThereIsNoMemoryIsGivenBack) {
  owner.take(10000);
  {
    const MissingSmallMemory missing;
    EXPECT_ANY_THROW(owner.take(10000));
  }
  owner.take(10000);
  EXPECT_EQ(owner.bytes_held(), 12288);
}

TEST_P(Window, AReleasedBlockIsHandedOutAgain) {
  owner.take(10000);
  owner.take(9000);
  EXPECT_EQ(owner.bytes_held(), 12288);
}

TEST_P(Window, AFreeBlockGrowsInPlaceAndPeersSeeTheNewMemory) {
  {
    const Buffer small = owner.take(10000);
    reach(small)[0] = std::byte{1};
  }
  const Buffer grown = owner.take(20000);
  EXPECT_EQ(owner.bytes_held(), 20480);
  std::byte* seen = reach(grown);
  seen[19999] = std::byte{3};
  EXPECT_EQ(grown.data()[19999], std::byte{3});
}

TEST_P(Window, GrowthNeverMovesALiveLease) {
  const Buffer live = owner.take(10000);
  std::byte* seen = reach(live);
  const Buffer other = owner.take(20000);
  EXPECT_EQ(owner.bytes_held(), 12288 + 20480);
  live.data()[0] = std::byte{5};
  EXPECT_EQ(seen[0], std::byte{5});
  EXPECT_EQ(reach(live), seen);
}

// Blocks do not accumulate when sizes change from step to step.
TEST_P(Window, RisingSizesHoldNoMoreThanTheLargest) {
  for (int64_t step = 0; step < 20; ++step) owner.take((100 + step) * 4096);
  EXPECT_EQ(owner.bytes_held(), 119 * 4096);
}

// A peer may still be writing after the rank that owns the memory has given up.
TEST_P(Window, MemoryOutlivesThePoolUntilTheCommunicatorLetsItGo) {
  std::byte* data = nullptr;
  {
    WindowPool gone(owner_rank);
    data = gone.take(10000).data();
  }
  std::memset(data, 7, 10000);  // AddressSanitizer would detect a use after free
  const Buffer other(12288);    // would get the memory if it were free
  std::memset(other.data(), 9, 12288);
  EXPECT_EQ(data[9999], std::byte{7});
}

TEST(GroupOptions, StagingIsNoMoreThanTheEngineCanHaveInFlight) {
  const auto staging_of = [](int64_t staging_bytes) {
    GroupOptions options;
    options.staging_bytes = staging_bytes;
    return Group(std::make_unique<StillCommunicator>(0, true), options).options().staging_bytes;
  };
  EXPECT_EQ(staging_of(5000), 1000);
  EXPECT_EQ(staging_of(500), 500);
}

INSTANTIATE_TEST_SUITE_P(Threads, Window, testing::Values(true));
INSTANTIATE_TEST_SUITE_P(Processes, Window, testing::Values(false));

}  // namespace
}  // namespace crossdock::comm
