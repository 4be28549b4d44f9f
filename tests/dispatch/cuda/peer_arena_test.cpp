// Arenas mapped as other processes map them, but in one process: its own memory at other addresses.

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <semaphore>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/cuda/shared_arena.hpp"
#include "core/cuda/device.hpp"
#include "dispatch/cuda/gate.hpp"
#include "dispatch/cuda/tensors.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

using namespace std::chrono_literals;
using CudaPeerArena = CudaTest;

constexpr auto kSharing = cuda::MemorySharing::kDescriptors;

// An arena that ends with the test.
struct Owner {
  int device = 0;
  std::shared_ptr<cuda::RangeArena> arena = std::make_shared<cuda::RangeArena>(device, kSharing);
  cuda::SharedArena shared{arena};
};

std::shared_ptr<cuda::PeerArena> open(const Owner& owner) {
  return cuda::PeerArena::open(owner.shared.card(), kSharing, owner.device);
}

void write(void* to, int value, int64_t num_bytes) {
  const RankStream stream;
  cuda_ok(cudaMemsetAsync(to, value, static_cast<size_t>(num_bytes), stream.get()));
  stream.synchronize();
}

// Number of bytes that have this value.
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

// The peer makes no call, and its stream is blocked.
TEST_F(CudaPeerArena, IsMappedBeforePublishReturns) {
  Owner owner;
  const std::shared_ptr<cuda::PeerArena> peer = open(owner);
  const RankStream stream;
  StreamGate gate(stream.get());
  std::vector<std::shared_ptr<void>> kept;
  for (int value = 1; value <= 3; ++value) {
    const int64_t num_bytes = owner.arena->num_bytes() + 1;  // spans chunks
    kept.push_back(owner.arena->allocate(num_bytes));
    const cuda::SharedArena::Extent published = owner.shared.publish(20s);
    EXPECT_EQ(published.num_chunks, owner.arena->chunks().size());
    EXPECT_EQ(published.num_bytes, owner.arena->num_bytes());
    EXPECT_EQ(peer->num_bytes(), owner.arena->num_bytes());
    EXPECT_TRUE(gate.is_closed());
    write(kept.back().get(), value, num_bytes);
    const int64_t offset = static_cast<std::byte*>(kept.back().get()) - owner.arena->base();
    EXPECT_EQ(count(peer->base() + offset, value, num_bytes), num_bytes);
  }
  peer->extend(owner.shared.announce(0), 1ms);  // all of it is mapped
  gate.open();
  stream.synchronize();
}

TEST_F(CudaPeerArena, IsPublishedToThoseWhoAreStillConnected) {
  Owner owner;
  EXPECT_GT(owner.shared.publish(1ms).num_bytes, 0);  // no peer is connected
  std::optional<comm::DescriptorConnection> silent(owner.shared.card().address);
  const std::shared_ptr<cuda::PeerArena> peer = open(owner);
  const std::string message = message_of([&] { owner.shared.publish(1ms); }, ErrorCode::kTimeout);
  EXPECT_NE(message.find("waited 0.001 s for processes on this node to map"), std::string::npos)
      << message;
  silent.reset();
  EXPECT_EQ(owner.shared.publish(20s).num_bytes, owner.arena->num_bytes());
  EXPECT_EQ(peer->num_bytes(), owner.arena->num_bytes());
}

TEST_F(CudaPeerArena, IsNotPublishedIfAProcessCannotMapIt) {
  Owner owner;
  const comm::DescriptorConnection refusing(owner.shared.card().address);
  refusing.send_receipt(comm::DescriptorReceipt::of_failure(0, "no room left"));
  const std::string message =
      message_of([&] { owner.shared.publish(20s); }, ErrorCode::kCommunication);
  EXPECT_NE(message.find("cannot map new memory of GPU 0: no room left"), std::string::npos)
      << message;
}

// The owner passes a descriptor that is not GPU memory.
TEST_F(CudaPeerArena, SaysOnBothSidesThatAChunkCannotBeMapped) {
  const Owner model;
  comm::DescriptorListener listener;
  const cuda::ArenaCard card{.id = comm::make_secret(),
                             .address = listener.address(),
                             .capacity = model.arena->capacity()};
  const auto peer = cuda::PeerArena::open(card, kSharing, 0);
  const comm::DescriptorConnection owner = std::move(listener.accept().at(0));
  const Descriptor file(memfd_create("peer_arena_test", MFD_CLOEXEC));
  owner.send(file, {.index = 0, .num_bytes = model.arena->num_bytes()});
  const std::vector<cuda::ChunkNotice> news{{.index = 0, .num_bytes = model.arena->num_bytes()}};
  const std::string reason = message_of([&] { peer->extend(news, 20s); });
  EXPECT_EQ(reason.find("in time"), std::string::npos) << reason;
  std::optional<comm::DescriptorReceipt> receipt;
  for (int round = 0; round < 10'000 && !receipt; ++round) {
    receipt = owner.receive_receipt();
    std::this_thread::sleep_for(1ms);
  }
  ASSERT_TRUE(receipt.has_value());
  EXPECT_EQ(receipt->index, 0);
  EXPECT_EQ(receipt->reason(), reason.substr(0, receipt->reason().size()));
  EXPECT_FALSE(receipt->reason().empty());
  EXPECT_NE(cuda::PeerArena::open(card, kSharing, 0), peer);
}

TEST_F(CudaPeerArena, TellsThatItsOwnerHasEnded) {
  std::optional<Owner> owner(std::in_place);
  const std::shared_ptr<cuda::PeerArena> peer = open(*owner);
  owner->shared.publish(20s);
  std::binary_semaphore has_ended{0};
  std::atomic<bool> is_cancelled_called = false;
  const auto watch = peer->watch_owner([&] { has_ended.release(); });
  {
    const auto cancelled = peer->watch_owner([&] { is_cancelled_called = true; });
  }
  EXPECT_FALSE(has_ended.try_acquire());
  owner.reset();
  EXPECT_TRUE(has_ended.try_acquire_for(20s));
  EXPECT_FALSE(is_cancelled_called);
  bool is_called = false;
  const auto late = peer->watch_owner([&] { is_called = true; });
  EXPECT_TRUE(is_called);
  const std::vector<cuda::ChunkNotice> missing{{.index = 1, .num_bytes = 1}};
  EXPECT_NE(message_of([&] { peer->extend(missing, 20s); }).find("has ended"), std::string::npos);
}

// On a machine with several GPUs: returning to GPU 0 would make a context there. The service thread
// also tells that the owner has ended.
TEST_F(CudaPeerArena, IsMappedByAThreadThatStaysOnItsGpu) {
  const int device = cuda::num_devices() - 1;
  std::unique_ptr<Owner> owner(new Owner{.device = device});
  const std::shared_ptr<cuda::PeerArena> peer = open(*owner);
  owner->shared.publish(20s);
  std::binary_semaphore has_ended{0};
  std::atomic<int> device_of_thread = -1;
  const auto watch = peer->watch_owner([&] {
    int current = -1;
    cudaGetDevice(&current);
    device_of_thread = current;
    has_ended.release();
  });
  owner.reset();
  ASSERT_TRUE(has_ended.try_acquire_for(20s));
  EXPECT_EQ(device_of_thread, device);
}

}  // namespace
}  // namespace crossdock
