#pragma once

#include <cstddef>
#include <cstdint>

namespace crossdock {

/// How a copy of many rows stores them.
enum class Stores : uint8_t {
  kCached,    // plain stores: for data that is small or read again soon
  kStreaming  // bypass the caches: an output larger than the caches is not read first
};

/// The better choice for an operation that writes num_bytes in total.
Stores stores_for(int64_t num_bytes);

/// Copies bits. The ranges must not overlap; 0 bytes and null pointers are valid. After the last
/// streaming copy, call finish_stores before telling another thread that the data is ready.
void copy_bytes(std::byte* to, const std::byte* from, int64_t num_bytes, Stores stores);

/// Orders all streaming stores of this thread before its later stores.
void finish_stores();

}  // namespace crossdock
