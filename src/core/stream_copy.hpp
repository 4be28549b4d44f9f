#pragma once

#include <cstddef>
#include <cstdint>

namespace crossdock {

/// How a copy of many rows stores them.
enum class Stores : uint8_t {
  kCached,    // plain: what is read again soon, or is small
  kStreaming  // past the caches: an output larger than they are costs no reading of its old lines
};

/// The better choice for an operation that writes `num_bytes` in all.
Stores stores_for(int64_t num_bytes);

/// Copies bits; the ranges must not overlap, 0 bytes and null pointers are legal. After the last
/// streaming copy, and before another thread is told that the data is there, call finish_stores.
void copy_bytes(std::byte* to, const std::byte* from, int64_t num_bytes, Stores stores);

/// Orders all streaming stores of this thread before what follows.
void finish_stores();

}  // namespace crossdock
