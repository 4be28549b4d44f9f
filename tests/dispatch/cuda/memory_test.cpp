// Device memory that peers may have mapped, and memory of graphs.

#include <gtest/gtest.h>

#include "core/cuda/device_arena.hpp"
#include "core/cuda/device_pool.hpp"
#include "dispatch/cuda/gate.hpp"
#include "dispatch/cuda/tensors.hpp"

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
TEST_F(CudaMemory, ExportedToOtherProcessesIsHandedOutAgainAndNeverFreed) {
  constexpr int64_t kBytes = int64_t{512} << 20;
  std::byte* first = nullptr;
  int64_t free_while_used = 0;
  {
    const Buffer buffer = cuda::allocate_device(*cuda::DeviceArena::make(0, true), kBytes);
    first = buffer.data();
    free_while_used = free_bytes();
  }
  EXPECT_LT(free_bytes(), free_while_used + kBytes / 2);
  const Buffer smaller = cuda::allocate_device(*cuda::DeviceArena::make(0, true), kBytes / 4);
  EXPECT_NE(smaller.data(), first);  // it would waste three quarters
  const Buffer again = cuda::allocate_device(*cuda::DeviceArena::make(0, true), kBytes / 4 * 3);
  EXPECT_EQ(again.data(), first);
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

// The pool outlives what peers may still do with it; the driver would not.
TEST_F(CudaMemory, TakenByAGraphGoesBackToThePool) {
  constexpr int64_t kBytes = int64_t{1} << 20;
  const RankStream stream;
  cuda::DevicePool pool(cuda::DeviceArena::make(0, /*is_exported=*/false));
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
  cuda::DevicePool pool(cuda::DeviceArena::make(0, /*is_exported=*/false));
  Buffer buffer = pool.take(kBytes, stream.get());
  const std::byte* const first = buffer.data();
  StreamGate gate(stream.get());
  buffer = {};  // released behind the gate
  capture(stream, [&] { buffer = pool.take(kBytes, stream.get()); });
  EXPECT_NE(buffer.data(), first);
  gate.open();
  stream.synchronize();
}

}  // namespace
}  // namespace crossdock
