#include "layer/chunk_pipeline.hpp"

#include <utility>

#include "core/pool_wait.hpp"

namespace crossdock {

ChunkPipeline::~ChunkPipeline() {
  const detail::PoolWait waiting;
  std::unique_lock lock(mutex_);
  work_.clear();
  is_idle_.wait(lock, [this] { return num_tasks_ == 0; });
}

void ChunkPipeline::add(std::function<void()> work) {
  std::unique_lock lock(mutex_);
  throw_error(lock);
  work_.push_back(std::move(work));
  if (worker_ == nullptr) return;
  worker_->add([this] { run_next(); });
  ++num_tasks_;  // the task waits for the mutex
}

void ChunkPipeline::finish() {
  if (worker_ == nullptr) {
    for (; !work_.empty(); work_.pop_front()) work_.front()();
    return;
  }
  const detail::PoolWait waiting;
  std::unique_lock lock(mutex_);
  is_idle_.wait(lock, [this] { return num_tasks_ == 0; });
  throw_error(lock);
}

// A task of the worker. Work is destroyed, with what it holds, before its owner can know of its
// end.
void ChunkPipeline::run_next() {
  std::unique_lock lock(mutex_);
  if (!work_.empty()) {
    std::function<void()> work = std::move(work_.front());
    work_.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      work();
    } catch (...) {
      error = std::current_exception();
    }
    work = nullptr;
    lock.lock();
    if (error) {
      error_ = error;
      work_.clear();
    }
  }
  if (--num_tasks_ == 0) is_idle_.notify_one();
}

void ChunkPipeline::throw_error(std::unique_lock<std::mutex>& lock) {
  if (!error_) return;
  const std::exception_ptr error = std::exchange(error_, nullptr);
  lock.unlock();
  std::rethrow_exception(error);
}

}  // namespace crossdock
