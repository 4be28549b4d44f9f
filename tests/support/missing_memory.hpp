#pragma once

#include <cstdint>

namespace crossdock {

/// While it exists, allocations of one size fail in this process after the first `num_granted`:
/// buffers of that size throw std::bad_alloc. For sizes below 2 MiB, which are rounded to pages.
/// Only one may exist at a time.
class MissingMemory {
 public:
  explicit MissingMemory(int64_t buffer_bytes, int64_t num_granted = 0);
  ~MissingMemory();
  MissingMemory(const MissingMemory&) = delete;
  MissingMemory& operator=(const MissingMemory&) = delete;

  /// The number of failed allocations.
  static int64_t num_refused();
};

/// While it exists, `new` throws std::bad_alloc in this thread.
class MissingSmallMemory {
 public:
  MissingSmallMemory() { begin(); }
  ~MissingSmallMemory();
  MissingSmallMemory(const MissingSmallMemory&) = delete;
  MissingSmallMemory& operator=(const MissingSmallMemory&) = delete;

  /// For the rest of the thread.
  static void begin();
};

}  // namespace crossdock
