// Device memory that peers may have mapped, and memory of graphs.

#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "core/cuda/device_arena.hpp"
#include "core/cuda/device_pool.hpp"
#include "dispatch/cuda/gate.hpp"
#include "dispatch/cuda/tensors.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

using CudaMemory = CudaTest;

int64_t free_bytes() {
  size_t free = 0;
  size_t total = 0;
  cuda_ok(cudaMemGetInfo(&free, &total));
  return static_cast<int64_t>(free);
}

// Another process may have mapped it: freeing it under the mapping is undefined.
TEST_F(CudaMemory, ExportedAllocationsAreHandedOutAgainAndNeverFreed) {
  constexpr int64_t kBytes = int64_t{512} << 20;
  const auto arena = cuda::DeviceArena::make(0, cuda::MemorySharing::kIpc);
  std::byte* first = nullptr;
  int64_t free_while_used = 0;
  {
    const Buffer buffer = cuda::allocate_device(*arena, kBytes);
    first = buffer.data();
    free_while_used = free_bytes();
  }
  EXPECT_LT(free_bytes(), free_while_used + kBytes / 2);
  const Buffer smaller = cuda::allocate_device(*arena, kBytes / 4);
  EXPECT_NE(smaller.data(), first);  // it would waste three quarters
  const Buffer again = cuda::allocate_device(*arena, kBytes / 4 * 3);
  EXPECT_EQ(again.data(), first);
}

// Not the process's own arena, so tests do not depend on each other.
std::shared_ptr<cuda::RangeArena> range_arena() {
  return std::make_shared<cuda::RangeArena>(0, cuda::MemorySharing::kDescriptors);
}

// Peers map all of it once, so it must not move, shrink or have holes.
TEST_F(CudaMemory, ARangeArenaGrowsAtItsEndAndReusesItsMemory) {
  constexpr int64_t kBytes = int64_t{512} << 20;
  const auto arena = range_arena();
  Buffer first = cuda::allocate_device(*arena, kBytes);
  EXPECT_GE(first.data(), arena->base());
  EXPECT_LE(first.data() + kBytes, arena->base() + arena->num_bytes());
  const Buffer second = cuda::allocate_device(*arena, kBytes + 1);
  const int64_t grown = arena->num_bytes();
  EXPECT_LE(second.data() + kBytes + 1, arena->base() + grown);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(second.data()) % 256, 0u);
  std::byte* const place = first.data();
  first = {};
  const Buffer half = cuda::allocate_device(*arena, kBytes / 2);
  const Buffer other_half = cuda::allocate_device(*arena, kBytes / 2);
  EXPECT_EQ(half.data(), place);
  EXPECT_EQ(other_half.data(), place + kBytes / 2);
  EXPECT_EQ(arena->num_bytes(), grown);
  const std::vector<int64_t> chunks = arena->chunks();
  EXPECT_EQ(std::accumulate(chunks.begin(), chunks.end(), int64_t{0}), grown);
}

TEST_F(CudaMemory, OfARangeArenaIsNotReusedWhileTheDeviceUsesIt) {
  constexpr int64_t kBytes = int64_t{1} << 20;
  const auto arena = range_arena();
  const RankStream stream;
  const auto last_use = std::make_shared<cuda::OwnedEvent>(0);
  StreamGate gate(stream.get());
  std::shared_ptr<void> memory = arena->allocate(kBytes, last_use);
  void* const first = memory.get();
  last_use->record(stream.get());
  memory.reset();
  memory = arena->allocate(kBytes);
  EXPECT_NE(memory.get(), first);
  gate.open();
  stream.synchronize();
  std::shared_ptr<void> again = arena->allocate(kBytes);
  EXPECT_EQ(again.get(), first);
}

TEST_F(CudaMemory, MoreThanTheGpuHasIsAnErrorAndTheRangeArenaStaysUsable) {
  const auto arena = range_arena();
  const std::string message =
      message_of([&] { arena->allocate(arena->capacity() + 1); }, ErrorCode::kCuda);
  EXPECT_NE(message.find("out of memory"), std::string::npos) << message;
  EXPECT_NE(arena->allocate(1), nullptr);
}

// Kernels of this process may be waiting for a peer that waits for the growth.
TEST_F(CudaMemory, OfARangeArenaGrowsWhileAStreamIsHeldUp) {
  const auto arena = range_arena();
  const RankStream stream;
  StreamGate gate(stream.get());
  const int64_t before = arena->num_bytes();
  const std::shared_ptr<void> memory = arena->allocate(before + 1);
  EXPECT_GT(arena->num_bytes(), before);
  EXPECT_TRUE(gate.is_closed());
  gate.open();
  stream.synchronize();
}

// Runs body while the stream is captured.
template <typename Body>
void capture(const RankStream& stream, const Body& body) {
  cuda_ok(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal));
  body();
  cudaGraph_t graph = nullptr;
  cuda_ok(cudaStreamEndCapture(stream.get(), &graph));
  cuda_ok(cudaGraphDestroy(graph));
}

// The pool outlives any access by peers; memory returned to the driver would not.
TEST_F(CudaMemory, TakenByAGraphGoesBackToThePool) {
  constexpr int64_t kBytes = int64_t{1} << 20;
  const RankStream stream;
  cuda::DevicePool pool(cuda::DeviceArena::make(0, cuda::MemorySharing::kNone));
  Buffer buffer;
  capture(stream, [&] { buffer = pool.take(kBytes, stream.get()); });
  const std::byte* const first = buffer.data();
  buffer = {};
  EXPECT_EQ(pool.bytes_held(), kBytes);
  stream.synchronize();
  capture(stream, [&] { buffer = pool.take(kBytes, stream.get()); });
  EXPECT_EQ(buffer.data(), first);
  EXPECT_EQ(pool.bytes_held(), kBytes);
}

// A graph cannot wait for work that was queued before its capture.
TEST_F(CudaMemory, ThatTheDeviceStillUsesIsNotTakenByAGraph) {
  constexpr int64_t kBytes = int64_t{1} << 20;
  const RankStream stream;
  cuda::DevicePool pool(cuda::DeviceArena::make(0, cuda::MemorySharing::kNone));
  Buffer buffer = pool.take(kBytes, stream.get());
  const std::byte* const first = buffer.data();
  StreamGate gate(stream.get());
  buffer = {};  // released after the gate
  capture(stream, [&] { buffer = pool.take(kBytes, stream.get()); });
  EXPECT_NE(buffer.data(), first);
  gate.open();
  stream.synchronize();
}

}  // namespace
}  // namespace crossdock
