#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "crossdock/tensor.hpp"
#include "crossdock/thread_pool.hpp"

namespace crossdock::bench {

/// The measures of all steps, by as many threads as the machine has cores, however few of them this
/// process is bound to.
class CopyCeiling {
 public:
  /// Allocates and touches what copies of up to `max_bytes` need, which is max_bytes.
  explicit CopyCeiling(int64_t max_bytes);
  ~CopyCeiling();
  CopyCeiling(const CopyCeiling&) = delete;
  CopyCeiling& operator=(const CopyCeiling&) = delete;

  /// Time of one copy that reads and writes `num_bytes` together, so copies half of them.
  double copy_us(int64_t num_bytes);

  /// Time of one loop over consecutive memory that reads and writes as much as a step does, no more
  /// and no less: what is read is stored several times over, or summed into less. Cores often store
  /// more slowly than they load, and do both at once faster than either; a copy does not tell.
  double traffic_us(int64_t num_read, int64_t num_written);

 private:
  void store_repeatedly(int64_t first, int64_t last, double reads_per_store);
  void sum_repeatedly(int64_t first, int64_t last, double stores_per_read);
  // Runs body(first, last) on every thread's part of [0, count); returns the time it took.
  double time_us(int64_t count, const std::function<void(int64_t, int64_t)>& body);

  Buffer from_;
  Buffer to_;
  std::unique_ptr<ThreadPool> pool_;
};

}  // namespace crossdock::bench
