#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "crossdock/error.hpp"

namespace crossdock {

namespace detail {
class PoolWait;
}

/// When a parallel_for starts.
enum class Turn : uint8_t {
  kInOrder,  // after all calls submitted earlier
  kNext      // before all calls that have not started: for work that peers wait for
};

/// A pool of compute threads. Ranks that are threads of one process share a pool, so that at most
/// num_threads threads compute at a time, however many ranks there are; a rank that waits for the
/// pool sleeps. Results never depend on the size of the pool. Thread-safe. In a forked child, a
/// pool inherited from the parent has no threads and runs all work on the calling thread.
class CROSSDOCK_API ThreadPool {
 public:
  /// 0: one thread per core that this process may run on. A pool of size 1 starts no threads and
  /// runs all work on the calling thread: the right choice if there are as many ranks as cores.
  /// Throws Error(kUnsupported) if the threads cannot be started.
  explicit ThreadPool(int num_threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  /// Runs body(i) for every i in [0, count), in any order, and returns when all are done. Rethrows
  /// the first exception; indices that have not started by then are skipped. A nested call runs on
  /// the calling thread. A body may use groups and run_ranks; it must not wait by other means for
  /// threads that use this pool.
  void parallel_for(int64_t count, const std::function<void(int64_t)>& body,
                    Turn turn = Turn::kInOrder);

  /// The process's default pool, with CROSSDOCK_THREADS threads, else one per core.
  static std::shared_ptr<ThreadPool> process_wide();

 private:
  friend class detail::PoolWait;
  struct State;
  int num_threads_;
  std::unique_ptr<State> state_;
};

}  // namespace crossdock
