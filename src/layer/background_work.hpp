#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
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

/// Tasks that a worker runs in order while their owner continues with an exchange. Not thread-safe.
class BackgroundWork {
 public:
  /// The worker must outlive this object.
  explicit BackgroundWork(Worker& worker) : worker_(worker) {}
  /// Waits for the running task; discards tasks that have not started.
  ~BackgroundWork();
  BackgroundWork(const BackgroundWork&) = delete;
  BackgroundWork& operator=(const BackgroundWork&) = delete;

  /// Throws the exception of an earlier task if one has already failed.
  void add(std::function<void()> task);

  /// Waits for all tasks. Throws the exception of the first one that failed; no task runs after it.
  void finish();

 private:
  void run_next();
  void throw_error(std::unique_lock<std::mutex>& lock);

  Worker& worker_;
  std::mutex mutex_;
  std::condition_variable is_idle_;
  std::deque<std::function<void()>> waiting_;  // tasks that have not started
  int num_turns_ = 0;         // calls of run_next that the worker has yet to finish
  std::exception_ptr error_;  // not thrown yet
};

}  // namespace crossdock
