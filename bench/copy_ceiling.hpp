#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "crossdock/tensor.hpp"
#include "crossdock/thread_pool.hpp"

namespace crossdock::bench {

/// Reference times that steps are compared with, using one thread per core of the machine even if
/// this process is bound to fewer cores.
class CopyCeiling {
 public:
  /// Allocates and touches `max_bytes` of memory, enough for copies of up to that many bytes.
  explicit CopyCeiling(int64_t max_bytes);
  ~CopyCeiling();
  CopyCeiling(const CopyCeiling&) = delete;
  CopyCeiling& operator=(const CopyCeiling&) = delete;

  /// Time of a copy that reads and writes `num_bytes` in total, so copies half as many.
  double copy_us(int64_t num_bytes);

  /// Time of a loop over contiguous memory that reads and writes exactly as many bytes as a step:
  /// values are stored several times, or summed. A copy cannot show this limit, since cores often
  /// store more slowly than they load, and are fastest doing both at once.
  double traffic_us(int64_t num_read, int64_t num_written);

 private:
  void store_repeatedly(int64_t first, int64_t last, double reads_per_store);
  void sum_repeatedly(int64_t first, int64_t last, double stores_per_read);
  // Runs body(first, last) on each thread's part of [0, count); returns the time taken.
  double time_us(int64_t count, const std::function<void(int64_t, int64_t)>& body);

  Buffer from_;
  Buffer to_;
  std::unique_ptr<ThreadPool> pool_;
};

}  // namespace crossdock::bench
