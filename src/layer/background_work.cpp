#include "layer/background_work.hpp"

#include <utility>

#include "core/threading.hpp"

namespace crossdock {

BackgroundWork::~BackgroundWork() {
  const detail::PoolWait waiting;
  std::unique_lock lock(mutex_);
  waiting_.clear();
  is_idle_.wait(lock, [this] { return num_turns_ == 0; });
}

void BackgroundWork::add(std::function<void()> task) {
  std::unique_lock lock(mutex_);
  throw_error(lock);
  waiting_.push_back(std::move(task));
  worker_.add([this] { run_next(); });
  ++num_turns_;  // in time: run_next needs the mutex
}

void BackgroundWork::finish() {
  const detail::PoolWait waiting;
  std::unique_lock lock(mutex_);
  is_idle_.wait(lock, [this] { return num_turns_ == 0; });
  throw_error(lock);
}

// Runs on the worker. A task and everything it holds are destroyed before the owner learns that it
// has finished.
void BackgroundWork::run_next() {
  std::unique_lock lock(mutex_);
  if (!waiting_.empty()) {
    std::function<void()> task = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      task();
    } catch (...) {
      error = std::current_exception();
    }
    task = nullptr;
    lock.lock();
    if (error) {
      error_ = error;
      waiting_.clear();
    }
  }
  if (--num_turns_ == 0) is_idle_.notify_one();
}

void BackgroundWork::throw_error(std::unique_lock<std::mutex>& lock) {
  if (!error_) return;
  const std::exception_ptr error = std::exchange(error_, nullptr);
  lock.unlock();
  std::rethrow_exception(error);
}

Worker::Worker()
    : thread_(start_thread("the overlap of a layer; set overlap_chunks = 1 and "
                           "overlap_shared = false to run without",
                           [this] { run(); })) {}

Worker::~Worker() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void Worker::add(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  wake_.notify_one();
}

void Worker::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return is_stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
  }
}

}  // namespace crossdock
