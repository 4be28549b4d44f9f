#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "crossdock/error.hpp"

namespace crossdock {

namespace detail {
class PoolWait;
}

/// When a parallel_for has its turn.
enum class Turn : uint8_t {
  kInOrder,  // after those that came before
  kNext      // before all that has not begun: for work that peers wait for
};

/// Threads that compute. Ranks that are threads of one process share a pool, so that no more than
/// its size compute at a time, however many ranks there are; a rank that waits for the pool sleeps.
/// Results never depend on the size. Thread-safe.
class CROSSDOCK_API ThreadPool {
 public:
  /// 0: as many as the cores this process may run on. A pool of 1 has no thread of its own and
  /// works on the thread of its caller: right where there are as many ranks as cores already.
  /// Throws Error(kUnsupported) where the threads cannot be started.
  explicit ThreadPool(int num_threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  /// Runs body(i) for every i in [0, count), in any order, and returns when all are done. The first
  /// exception is passed on; what has not begun by then is left out. Inside a body it runs in
  /// place. A body may use groups and run_ranks; it must not wait by other means for threads that
  /// use this pool.
  void parallel_for(int64_t count, const std::function<void(int64_t)>& body,
                    Turn turn = Turn::kInOrder);

  /// The pool of those who name none. Its size is CROSSDOCK_THREADS, else the cores.
  static std::shared_ptr<ThreadPool> process_wide();

 private:
  friend class detail::PoolWait;
  struct State;
  int num_threads_;
  std::unique_ptr<State> state_;
};

}  // namespace crossdock
