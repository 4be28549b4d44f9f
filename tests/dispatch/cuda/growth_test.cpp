// Arenas of processes on one GPU, which grow while other processes map them. Compiled for each
// communicator of processes.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "comm/cuda/peer_memory.hpp"
#include "core/cuda/range_arena.hpp"
#include "dispatch/cuda/gate.hpp"
#include "dispatch/cuda/sharing.hpp"
#include "support/process_communicator.hpp"

namespace crossdock {
namespace {

using CudaGrowth = CudaSharing;

// An offset means the same memory to all ranks, and needs no exchange once the arena is mapped.
TEST_F(CudaGrowth, LeavesOffsetsThatNeedNoExchange) {
  constexpr int64_t kBytes = int64_t{1} << 20;
  share_by("fd");
  Group group(testing::make_process_communicator(), deadlines());
  const RankStream stream(group);
  const int device = stream.device().index;
  cuda::PeerMemory peers(group.communicator(), device);
  peers.meet(group, {});
  EXPECT_TRUE(peers.has_offsets());
  const auto arena = cuda::DeviceArena::make(device, peers.sharing());
  const Buffer memory = cuda::allocate_device(*arena, kBytes);
  reach_first_rank(group, peers, memory);  // whatever has grown is known now
  EXPECT_TRUE(peers.news().empty());
  const int64_t offset = exchange(group, std::vector{peers.offset_of(memory.data())}, 0)[0];
  EXPECT_LE(peers.offset_of(memory.data()) + kBytes, peers.common_bytes());
  EXPECT_LE(offset + kBytes, peers.mapped_bytes(0));
  for (int value = 1; value <= 3; ++value) {
    if (group.rank() == 0) {
      cuda_ok(cudaMemsetAsync(peers.base_of(0) + offset, value, kBytes, stream.get()));
      stream.synchronize();
    }
    group.agree({.operation = "written"});
    const auto seen = read(peers.base_of(0) + offset, kBytes, stream);
    EXPECT_EQ(std::ranges::count(seen, value), kBytes);
    group.agree({.operation = "read"});
  }
}

// Ranks that grow and map memory do not wait for their kernels, which may be waiting for a peer.
TEST_F(CudaGrowth, GoesOnWhileTheStreamsOfAllRanksAreHeldUp) {
  share_by("fd");
  Group group(testing::make_process_communicator(), deadlines());
  const RankStream stream(group);
  const int device = stream.device().index;
  cuda::PeerMemory peers(group.communicator(), device);
  peers.meet(group, {});
  const auto arena = cuda::RangeArena::make(device, peers.sharing());
  StreamGate gate(stream.get());
  const int64_t before = peers.mapped_bytes(0);
  const Buffer memory = cuda::allocate_device(*arena, arena->num_bytes() + 1);
  EXPECT_NE(reach_first_rank(group, peers, memory), nullptr);
  EXPECT_GT(peers.mapped_bytes(0), before);
  EXPECT_TRUE(gate.is_closed());
  gate.open();
  group.agree({.operation = "done"});
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
  share_by("fd");
  Group group(testing::make_process_communicator(), deadlines());
  const RankStream stream(group);
  const int device = stream.device().index;
  cuda::PeerMemory peers(group.communicator(), device);
  peers.meet(group, {});
  EXPECT_TRUE(peers.grows_alone());
  const auto arena = cuda::RangeArena::make(device, peers.sharing());
  const int64_t wanted = exchange(group, std::vector{arena->num_bytes()}, 0)[0] + kGrownBytes;
  Buffer memory;
  if (group.rank() == 0) {
    memory = grow_alone(peers, *arena, wanted);
    write(memory, 5, stream);
  } else {
    const StreamGate gate(stream.get());
    const std::jthread opener([&] {
      for (int round = 0; round < 20'000 && peers.mapped_bytes(0) < wanted; ++round) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      EXPECT_TRUE(gate.is_closed());
      gate.open();
    });
    stream.synchronize();
    EXPECT_GE(peers.mapped_bytes(0), wanted);
  }
  const std::vector shown{group.rank() == 0 ? peers.offset_of(memory.data()) : 0,
                          memory.num_bytes()};
  const std::vector<int64_t> place = exchange(group, shown, 0);
  const auto seen = read(peers.base_of(0) + place[0], place[1], stream);
  EXPECT_EQ(std::ranges::count(seen, 5), place[1]);
  group.agree({.operation = "done"});
}

// Growth that was published while it was being announced counts once.
TEST_F(CudaGrowth, MayBeBothAnnouncedAndPublished) {
  share_by("fd");
  Group group(testing::make_process_communicator(), deadlines());
  const RankStream stream(group);
  const int device = stream.device().index;
  cuda::PeerMemory peers(group.communicator(), device);
  peers.meet(group, {});
  const auto arena = cuda::RangeArena::make(device, peers.sharing());
  const Buffer memory = cuda::allocate_device(*arena, arena->num_bytes() + 1);
  const std::vector<cuda::ChunkNotice> news = peers.news();
  EXPECT_FALSE(news.empty());
  peers.publish();
  const auto heard = exchange(group, news, 0);
  peers.note_heard(news);
  peers.hear(0, heard);
  EXPECT_EQ(peers.common_bytes(), arena->num_bytes());
  EXPECT_TRUE(peers.news().empty());
  peers.publish();
  group.agree({.operation = "done"});
}

TEST_F(CudaGrowth, ReportsNoOwnerThatIsAlive) {
  share_by("fd");
  std::atomic<int> num_reported = 0;
  Group group(testing::make_process_communicator(), deadlines());
  const RankStream stream(group);
  cuda::PeerMemory peers(group.communicator(), stream.device().index);
  peers.meet(group, {});
  const auto watch = peers.watch_owners([&](int) { ++num_reported; });
  group.agree({.operation = "watched"});
  EXPECT_EQ(num_reported, 0);
}

}  // namespace
}  // namespace crossdock
