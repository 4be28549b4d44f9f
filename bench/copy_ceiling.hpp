#pragma once

#include <cstdint>
#include <memory>

#include "crossdock/buffer.hpp"
#include "crossdock/thread_pool.hpp"

namespace crossdock::bench {

/// The measure of all steps: a plain memcpy by as many threads as the machine has cores, however
/// few of them this process is bound to.
class CopyCeiling {
 public:
  /// Allocates and touches what copies of up to `max_bytes` need, which is max_bytes.
  explicit CopyCeiling(int64_t max_bytes);
  ~CopyCeiling();
  CopyCeiling(const CopyCeiling&) = delete;
  CopyCeiling& operator=(const CopyCeiling&) = delete;

  /// Time of one copy that reads and writes `num_bytes` together, so copies half of them.
  double copy_us(int64_t num_bytes);

 private:
  Buffer from_;
  Buffer to_;
  std::unique_ptr<ThreadPool> pool_;
};

}  // namespace crossdock::bench
