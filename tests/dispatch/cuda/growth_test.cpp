// Arenas of processes on one GPU, which grow while other processes map them. Compiled for each
// communicator of processes.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "comm/cuda/peer_memory.hpp"
#include "core/cuda/device_arena.hpp"
#include "dispatch/cuda/gate.hpp"
#include "dispatch/cuda/sharing.hpp"
#include "support/process_communicator.hpp"

namespace crossdock {
namespace {

class CudaGrowth : public CudaSharing {
 protected:
  void SetUp() override {
    share_by("fd");
    CudaSharing::SetUp();
  }
};

// A rank that has met the others: they have agreed on how they share memory.
struct SharingRank {
  SharingRank() { peers.share_memory(group, {}); }

  std::shared_ptr<cuda::RangeArena> arena() const {
    return cuda::RangeArena::make(device, peers.sharing());
  }
  // Number of bytes that have this value.
  int64_t count(int value, const std::byte* from, int64_t num_bytes) const {
    return std::ranges::count(read(from, num_bytes, stream), value);
  }

  Group group{testing::make_process_communicator(), deadlines()};
  const RankStream stream{group};
  const int device = stream.device().index;
  cuda::PeerMemory peers{group.communicator(), device};
};

// An offset means the same memory to all ranks, and needs no exchange once the arena is mapped.
TEST_F(CudaGrowth, LeavesOffsetsThatNeedNoExchange) {
  constexpr int64_t kBytes = int64_t{1} << 20;
  SharingRank rank;
  EXPECT_TRUE(rank.peers.has_offsets());
  const auto arena = cuda::DeviceArena::make(rank.device, rank.peers.sharing());
  const Buffer memory = cuda::allocate_device(*arena, kBytes);
  reach_first_rank(rank.group, rank.peers, memory);  // all growth is known now
  EXPECT_TRUE(rank.peers.news().empty());
  const int64_t offset =
      exchange(rank.group, std::vector{rank.peers.offset_of(memory.data())}, 0)[0];
  EXPECT_LE(rank.peers.offset_of(memory.data()) + kBytes, rank.peers.common_bytes());
  EXPECT_LE(offset + kBytes, rank.peers.mapped_bytes(0));
  for (int value = 1; value <= 3; ++value) {
    if (rank.group.rank() == 0) {
      cuda_ok(cudaMemsetAsync(rank.peers.base_of(0) + offset, value, kBytes, rank.stream.get()));
      rank.stream.synchronize();
    }
    rank.group.agree({.operation = "written"});
    EXPECT_EQ(rank.count(value, rank.peers.base_of(0) + offset, kBytes), kBytes);
    rank.group.agree({.operation = "read"});
  }
}

// Ranks that grow and map memory do not wait for their kernels, which may be waiting for a peer.
TEST_F(CudaGrowth, GoesOnWhileTheStreamsOfAllRanksAreHeldUp) {
  SharingRank rank;
  const auto arena = rank.arena();
  StreamGate gate(rank.stream.get());
  const int64_t before = rank.peers.mapped_bytes(0);
  rank.group.agree({.operation = "sizes are read"});  // service threads map what a rank has grown
  const Buffer memory = cuda::allocate_device(*arena, arena->num_bytes() + 1);
  EXPECT_NE(reach_first_rank(rank.group, rank.peers, memory), nullptr);
  EXPECT_GT(rank.peers.mapped_bytes(0), before);
  EXPECT_TRUE(gate.is_closed());
  gate.open();
  rank.group.agree({.operation = "done"});
}

// Grows the arena to at least this size and publishes each growth. Returns the last block.
Buffer grow_alone(cuda::PeerMemory& peers, cuda::RangeArena& arena, int64_t wanted_bytes) {
  constexpr int64_t kBlockBytes = int64_t{32} << 20;
  std::vector<Buffer> kept;
  do {
    kept.push_back(cuda::allocate_device(arena, kBlockBytes));
    peers.publish();
    EXPECT_EQ(peers.common_bytes(), arena.num_bytes());
    EXPECT_TRUE(peers.news().empty());
  } while (arena.num_bytes() < wanted_bytes);
  return std::move(kept.back());
}

// The hosts of the other ranks are blocked until rank 0 has grown: only their service threads run.
TEST_F(CudaGrowth, GoesOnWhileTheHostsOfTheOtherRanksAreBlocked) {
  constexpr int64_t kGrownBytes = int64_t{256} << 20;
  SharingRank rank;
  EXPECT_TRUE(rank.peers.grows_alone());
  const auto arena = rank.arena();
  const int64_t wanted = exchange(rank.group, std::vector{arena->num_bytes()}, 0)[0] + kGrownBytes;
  Buffer memory;
  if (rank.group.rank() == 0) {
    memory = grow_alone(rank.peers, *arena, wanted);
    write(memory, 5, rank.stream);
  } else {
    const StreamGate gate(rank.stream.get());
    const std::jthread opener([&] {
      for (int round = 0; round < 20'000 && rank.peers.mapped_bytes(0) < wanted; ++round) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      EXPECT_TRUE(gate.is_closed());
      gate.open();
    });
    rank.stream.synchronize();
    EXPECT_GE(rank.peers.mapped_bytes(0), wanted);
  }
  const std::vector shown{rank.group.rank() == 0 ? rank.peers.offset_of(memory.data()) : 0,
                          memory.num_bytes()};
  const std::vector<int64_t> place = exchange(rank.group, shown, 0);
  EXPECT_EQ(rank.count(5, rank.peers.base_of(0) + place[0], place[1]), place[1]);
  rank.group.agree({.operation = "done"});
}

// Growth that was published while it was being announced counts once.
TEST_F(CudaGrowth, MayBeBothAnnouncedAndPublished) {
  SharingRank rank;
  const auto arena = rank.arena();
  const Buffer memory = cuda::allocate_device(*arena, arena->num_bytes() + 1);
  const std::vector<cuda::ChunkNotice> news = rank.peers.news();
  EXPECT_FALSE(news.empty());
  rank.peers.publish();
  const auto heard = exchange(rank.group, news, 0);
  rank.peers.note_heard(news);
  rank.peers.hear(0, heard);
  EXPECT_EQ(rank.peers.common_bytes(), arena->num_bytes());
  EXPECT_TRUE(rank.peers.news().empty());
  rank.peers.publish();
  rank.group.agree({.operation = "done"});
}

TEST_F(CudaGrowth, ReportsNoOwnerThatIsAlive) {
  std::atomic<int> num_reported = 0;
  SharingRank rank;
  const auto watch = rank.peers.watch_owners([&](int) { ++num_reported; });
  rank.group.agree({.operation = "watched"});
  EXPECT_EQ(num_reported, 0);
}

}  // namespace
}  // namespace crossdock
