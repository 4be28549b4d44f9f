#pragma once

#include "crossdock/thread_pool.hpp"

namespace crossdock::detail {

/// Marks a thread pool's worker as waiting for other threads during this object's life. They may
/// need the pool themselves: while all workers wait, callers of parallel_for run the bodies on
/// their own threads. Does nothing on any other thread.
class PoolWait {
 public:
  PoolWait();
  ~PoolWait();
  PoolWait(const PoolWait&) = delete;
  PoolWait& operator=(const PoolWait&) = delete;

 private:
  ThreadPool::State* pool_;  // null: not a worker
};

}  // namespace crossdock::detail
