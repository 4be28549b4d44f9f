#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "crossdock/error.hpp"
#include "crossdock/tensor.hpp"
#include "support/missing_memory.hpp"

namespace crossdock {
namespace {

TEST(Buffer, OwnerKeepsTheMemoryAliveAfterTheBufferIsGone) {
  std::shared_ptr<const void> owner;
  std::byte* data = nullptr;
  {
    const Buffer buffer(100);
    owner = buffer.owner();
    data = buffer.data();
  }
  std::memset(data, 7, 100);  // AddressSanitizer would detect a use after free
  EXPECT_EQ(data[99], std::byte{7});
}

TEST(Buffer, IsEmptyAfterAMove) {
  Buffer from(64);
  const std::byte* const data = from.data();
  const Buffer to = std::move(from);
  EXPECT_EQ(to.data(), data);
  EXPECT_EQ(from.data(), nullptr);  // NOLINT(bugprone-use-after-move): that is the test
  EXPECT_EQ(from.num_bytes(), 0);
  EXPECT_EQ(from.owner(), nullptr);
}

TEST(Buffer, IsAlignedAndRefusesAViewThatDoesNotFit) {
  const Buffer buffer(64);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0u);
  EXPECT_EQ(buffer.view(DType::kF32, {4, 4}).num_bytes(), 64);
  EXPECT_THROW(static_cast<void>(buffer.view(DType::kF32, {4, 5})), Error);
  EXPECT_EQ(Buffer(0).data(), nullptr);
}

TEST(BufferPool, HandsTheSameMemoryOutAgain) {
  BufferPool pool;
  std::byte* first = nullptr;
  {
    const Buffer buffer = pool.take(1 << 20);
    first = buffer.data();
    EXPECT_EQ(pool.bytes_in_use(), 1 << 20);
  }
  EXPECT_EQ(pool.bytes_in_use(), 0);
  EXPECT_EQ(pool.bytes_held(), 1 << 20);
  EXPECT_EQ(pool.take((1 << 20) - 5000).data(), first);
}

TEST(BufferPool, FreesABlockThatItHasNoMemoryToKeep) {
  BufferPool pool;
  for (int i = 0; i < 2; ++i) {
    Buffer buffer = pool.take(1 << 20);
    {
      const MissingSmallMemory missing;
      buffer = {};
    }
    EXPECT_EQ(pool.bytes_in_use(), 0);
    EXPECT_EQ(pool.bytes_held(), 0);
  }
}

TEST(BufferPool, DoesNotWasteALargeBlockOnASmallRequest) {
  BufferPool pool;
  std::byte* large = nullptr;
  {
    const Buffer buffer = pool.take(1 << 20);
    large = buffer.data();
  }
  EXPECT_NE(pool.take(4096).data(), large);
}

// Blocks do not accumulate when sizes change from step to step.
TEST(BufferPool, RisingSizesHoldNoMoreThanTheLargest) {
  BufferPool pool;
  for (int64_t step = 0; step < 20; ++step) static_cast<void>(pool.take((100 + step) * 4096));
  EXPECT_EQ(pool.bytes_held(), 119 * 4096);
}

// A free block that is too large for the current request is not kept beside the new one.
TEST(BufferPool, HoldsHardlyMoreThanWasInUseAtOnce) {
  BufferPool pool;
  constexpr int64_t kUnit = 1 << 20;
  for (int step = 0; step < 5; ++step) {
    const Buffer rows = pool.take(10 * kUnit);
    { const Buffer gathered = pool.take_scratch(20 * kUnit); }
    const Buffer results = pool.take((10 + step) * kUnit);
    { const Buffer sent = pool.take_scratch(7 * kUnit), received = pool.take_scratch(8 * kUnit); }
  }
  constexpr int64_t kMostInUse = (10 + 14 + 7 + 8) * kUnit;
  EXPECT_LE(pool.bytes_held(), kMostInUse + kMostInUse / 16);
}

TEST(BufferPool, ScratchTakesAnyBlockThatIsFree) {
  BufferPool pool;
  const std::byte* large = pool.take(1 << 20).data();
  EXPECT_EQ(pool.take_scratch(4096).data(), large);
  EXPECT_EQ(pool.bytes_held(), 1 << 20);
}

TEST(BufferPool, CountsNothingForMemoryThatCouldNotBeHad) {
  BufferPool pool;
  const Buffer held = pool.take(1 << 16);
  {
    const MissingMemory missing(3 << 16);
    EXPECT_THROW(static_cast<void>(pool.take(3 << 16)), std::bad_alloc);
  }
  EXPECT_EQ(pool.bytes_in_use(), 1 << 16);
  EXPECT_EQ(pool.bytes_held(), 1 << 16);
  const Buffer after = pool.take(3 << 16);
  EXPECT_EQ(pool.bytes_held(), 4 << 16);
}

TEST(BufferPool, RefusesWhatNoMemoryCanHold) {
  BufferPool pool;
  for (const int64_t num_bytes : {std::numeric_limits<int64_t>::max(), int64_t{1} << 62}) {
    EXPECT_THROW(static_cast<void>(pool.take(num_bytes)), std::bad_alloc);
    EXPECT_THROW(Buffer{num_bytes}, std::bad_alloc);
  }
  EXPECT_EQ(pool.bytes_held(), 0);
  EXPECT_THROW(static_cast<void>(pool.take(DType::kF32, {int64_t{1} << 40, int64_t{1} << 40})),
               Error);
}

TEST(BufferPool, BuffersOutliveThePool) {
  std::optional<Buffer> buffer;
  {
    BufferPool pool;
    buffer = pool.take(1000);
  }
  std::memset(buffer->data(), 1, 1000);
  EXPECT_EQ(buffer->bytes()[999], std::byte{1});
}

TEST(BufferPool, NothingIsTakenForZeroBytes) {
  BufferPool pool;
  EXPECT_EQ(pool.take(0).data(), nullptr);
  EXPECT_EQ(pool.bytes_held(), 0);
  EXPECT_THROW(static_cast<void>(pool.take(-1)), Error);
}

}  // namespace
}  // namespace crossdock
