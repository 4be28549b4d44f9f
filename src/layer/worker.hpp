#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace crossdock {

/// A thread that runs tasks in the order they were added. Thread-safe.
class Worker {
 public:
  /// Throws Error(kUnsupported) if no thread can be started.
  Worker();
  /// Waits for all tasks.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  /// REQUIRES: the task does not throw.
  void add(std::function<void()> task);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  bool is_stopping_ = false;
  std::thread thread_;
};

}  // namespace crossdock
