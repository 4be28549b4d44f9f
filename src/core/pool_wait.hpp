#pragma once

#include "crossdock/thread_pool.hpp"

namespace crossdock::detail {

/// Says, on a thread pool's worker, that it waits for other threads as long as this lives. Those
/// may need the pool themselves: while all its workers wait, callers run the bodies of their
/// parallel_for on their own threads. On any other thread it does nothing.
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
