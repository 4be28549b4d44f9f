#pragma once

#include <cstdint>

namespace crossdock {

/// While it lives, memory of one size cannot be had in this process, after the first `num_granted`
/// times: buffers of it end in std::bad_alloc. For sizes below 2 MiB, which are rounded to pages.
/// One at a time.
class MissingMemory {
 public:
  explicit MissingMemory(int64_t buffer_bytes, int64_t num_granted = 0);
  ~MissingMemory();
  MissingMemory(const MissingMemory&) = delete;
  MissingMemory& operator=(const MissingMemory&) = delete;

  /// How often it was asked for in vain.
  static int64_t num_refused();
};

}  // namespace crossdock
