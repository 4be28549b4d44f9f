// Arenas as other processes map them, in one process: its own memory at other addresses.

#include "comm/cuda/peer_arena.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "dispatch/cuda/tensors.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

using namespace std::chrono_literals;
using CudaPeerArena = CudaTest;

constexpr auto kSharing = cuda::MemorySharing::kDescriptors;

// An arena that ends with the test.
struct Owner {
  std::shared_ptr<cuda::RangeArena> arena = std::make_shared<cuda::RangeArena>(0, kSharing);
  cuda::SharedArena shared{arena};
};

std::shared_ptr<cuda::PeerArena> open(const Owner& owner) {
  return cuda::PeerArena::open(owner.shared.card(), kSharing, 0);
}

void write(void* to, int value, int64_t num_bytes) {
  const RankStream stream;
  cuda_ok(cudaMemsetAsync(to, value, static_cast<size_t>(num_bytes), stream.get()));
  stream.synchronize();
}

// How many of the bytes have this value.
int64_t count(const std::byte* from, int value, int64_t num_bytes) {
  const RankStream stream;
  std::vector<unsigned char> bytes(static_cast<size_t>(num_bytes));
  cuda_ok(cudaMemcpyAsync(bytes.data(), from, bytes.size(), cudaMemcpyDeviceToHost, stream.get()));
  stream.synchronize();
  return std::ranges::count(bytes, value);
}

TEST_F(CudaPeerArena, HasTheOwnersMemoryAtTheSameOffsetsWhileItGrows) {
  Owner owner;
  const std::shared_ptr<cuda::PeerArena> peer = open(owner);
  EXPECT_NE(peer->base(), owner.arena->base());
  size_t num_heard = 0;
  std::vector<std::shared_ptr<void>> kept;
  for (int value = 1; value <= 3; ++value) {
    const int64_t num_bytes = owner.arena->num_bytes() + 1;  // spans chunks
    kept.push_back(owner.arena->allocate(num_bytes));
    write(kept.back().get(), value, num_bytes);
    const std::vector<cuda::ChunkNotice> news = owner.shared.announce(num_heard);
    EXPECT_FALSE(news.empty());
    num_heard += news.size();
    peer->extend(news, 10s);
    EXPECT_EQ(peer->num_bytes(), owner.arena->num_bytes());
    const int64_t offset = static_cast<std::byte*>(kept.back().get()) - owner.arena->base();
    EXPECT_EQ(count(peer->base() + offset, value, num_bytes), num_bytes);
    write(peer->base() + offset, 100 + value, num_bytes);
    EXPECT_EQ(count(static_cast<std::byte*>(kept.back().get()), 100 + value, num_bytes), num_bytes);
  }
  EXPECT_TRUE(owner.shared.announce(num_heard).empty());
  peer->extend(owner.shared.announce(0), 10s);  // all of it is known
  EXPECT_EQ(peer->num_bytes(), owner.arena->num_bytes());
}

TEST_F(CudaPeerArena, StaysValidWhenItsOwnerHasEnded) {
  constexpr int64_t kBytes = int64_t{1} << 20;
  std::shared_ptr<cuda::PeerArena> peer;
  {
    Owner owner;
    const std::shared_ptr<void> memory = owner.arena->allocate(kBytes);
    write(owner.arena->base(), 7, kBytes);
    peer = open(owner);
    peer->extend(owner.shared.announce(0), 10s);
  }
  EXPECT_EQ(count(peer->base(), 7, kBytes), kBytes);
}

TEST_F(CudaPeerArena, IsMappedOnceAndKeptUntilItsOwnerHasEnded) {
  std::weak_ptr<cuda::PeerArena> kept;
  Owner other;
  {
    Owner owner;
    kept = open(owner);
    EXPECT_FALSE(kept.expired());  // nobody uses it
    EXPECT_EQ(open(owner), kept.lock());
    EXPECT_NE(open(other), kept.lock());
    owner.shared.announce(0);  // accepts the connection, which ends with the owner
  }
  open(other);
  EXPECT_TRUE(kept.expired());
}

TEST_F(CudaPeerArena, IsOpenedAnewAfterAChunkDidNotArrive) {
  Owner owner;
  const std::shared_ptr<cuda::PeerArena> peer = open(owner);
  const std::vector<cuda::ChunkNotice> invented{{.index = 0, .num_bytes = 1}};
  EXPECT_NE(message_of([&] { peer->extend(invented, 1ms); }).find("in time"), std::string::npos);
  const std::shared_ptr<cuda::PeerArena> again = open(owner);
  EXPECT_NE(again, peer);
  again->extend(owner.shared.announce(0), 10s);
  EXPECT_EQ(again->num_bytes(), owner.arena->num_bytes());
}

}  // namespace
}  // namespace crossdock
