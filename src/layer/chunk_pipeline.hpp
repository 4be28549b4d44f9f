#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>

#include "layer/worker.hpp"

namespace crossdock {

/// Work that goes with an exchange, one piece after the other in the order they were added, on a
/// worker, so that whoever adds can go on with the exchange. Used by one thread.
class ChunkPipeline {
 public:
  /// No worker: all work waits for finish(). The worker must outlive this object.
  explicit ChunkPipeline(Worker* worker) : worker_(worker) {}
  /// Leaves out what has not begun and waits for what has.
  ~ChunkPipeline();
  ChunkPipeline(const ChunkPipeline&) = delete;
  ChunkPipeline& operator=(const ChunkPipeline&) = delete;

  /// Throws what earlier work threw, if it is known already.
  void add(std::function<void()> work);

  /// Waits for all work. Throws what it threw; nothing that follows a failure has run.
  void finish();

 private:
  void run_next();
  void throw_error(std::unique_lock<std::mutex>& lock);

  Worker* worker_;
  std::mutex mutex_;
  std::condition_variable is_idle_;
  std::deque<std::function<void()>> work_;  // that has not begun
  int num_tasks_ = 0;                       // at the worker, each to run one piece of work
  std::exception_ptr error_;
};

}  // namespace crossdock
