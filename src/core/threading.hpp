#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "crossdock/thread_pool.hpp"

namespace crossdock {

/// Starts a std::thread. Throws Error(kUnsupported) if none can be started; `purpose` completes
/// "cannot start a thread for" and may add what to do.
template <typename Body>
std::thread start_thread(std::string_view purpose, Body body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw Error(ErrorCode::kUnsupported,
                concat("cannot start a thread (", error.code().message(), ") for ", purpose));
  }
}

/// Something that happens at most once, and the callbacks that it runs. Thread-safe.
class OneShotEvent {
 public:
  /// Calls `callback` once, when the event fires, on the thread that fires it; immediately if it
  /// has already fired. Destroying the result waits for the callback if it is running; after that
  /// it never runs. The callback must not throw or destroy the result. The result may outlive the
  /// event.
  [[nodiscard]] std::shared_ptr<const void> watch(std::function<void()> callback);

  /// Runs the callbacks. Further calls do nothing.
  void fire();

 private:
  struct Watcher;

  std::mutex mutex_;
  bool has_fired_ = false;
  std::vector<std::weak_ptr<Watcher>> watchers_;
};

}  // namespace crossdock

namespace crossdock::detail {

/// Cores that this process may use, at least 1.
int num_cores();

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
