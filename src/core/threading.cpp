#include "core/threading.hpp"

#include <sched.h>

#include <charconv>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/process.hpp"
#include "crossdock/thread_pool.hpp"

namespace crossdock::detail {

int num_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) return CPU_COUNT(&allowed);
  const unsigned cores = std::thread::hardware_concurrency();
  return cores > 0 ? static_cast<int>(cores) : 1;
}

}  // namespace crossdock::detail

namespace crossdock {

struct OneShotEvent::Watcher {
  std::mutex mutex;  // held while the callback runs
  std::function<void()> callback;

  void run() {
    const std::lock_guard lock(mutex);
    if (callback) callback();
  }
  void cancel() {
    const std::lock_guard lock(mutex);
    callback = nullptr;
  }
};

std::shared_ptr<const void> OneShotEvent::watch(std::function<void()> callback) {
  auto watcher = std::make_shared<Watcher>();
  watcher->callback = std::move(callback);
  const auto cancel = [watcher](const void*) { watcher->cancel(); };
  std::shared_ptr<const void> registration(watcher.get(), cancel);
  {
    const std::lock_guard lock(mutex_);
    if (!has_fired_) {
      std::erase_if(watchers_, [](const auto& other) { return other.expired(); });
      watchers_.push_back(watcher);
      return registration;
    }
  }
  watcher->run();
  return registration;
}

void OneShotEvent::fire() {
  std::vector<std::weak_ptr<Watcher>> watchers;
  {
    const std::lock_guard lock(mutex_);
    has_fired_ = true;
    watchers.swap(watchers_);
  }
  for (const std::weak_ptr<Watcher>& each : watchers) {
    if (const std::shared_ptr<Watcher> watcher = each.lock()) watcher->run();
  }
}

namespace {

constexpr int kMaxThreads = 4096;

int num_threads_from_environment() {
  const std::string text = environment_variable("CROSSDOCK_THREADS");
  if (text.empty()) return 0;
  int value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, failure] = std::from_chars(text.data(), end, value);
  CROSSDOCK_CHECK(failure == std::errc{} && stop == end && value >= 1 && value <= 4096,
                  "CROSSDOCK_THREADS must be a number from 1 to 4096, got \"", text, "\"");
  return value;
}

// One parallel_for; lives on its caller's stack until all started bodies have ended.
struct Job {
  const std::function<void(int64_t)>& body;
  int64_t count;
  int64_t num_begun = 0;
  int64_t num_done = 0;
  std::exception_ptr error;
  std::condition_variable done;
};

}  // namespace

struct ThreadPool::State {
  inline static thread_local State* of_this_thread = nullptr;  // set on the workers of a pool

  std::mutex mutex;
  std::condition_variable work;
  std::deque<Job*> jobs;  // jobs with bodies that have not started, in order
  bool is_stopping = false;
  std::vector<std::thread> workers;
  size_t num_waiting = 0;  // workers in a PoolWait
  const uint64_t generation = fork_generation();

  // A forked child has a copy of the pool, but not of its threads.
  bool is_of_parent() const { return generation != fork_generation(); }

  bool all_workers_wait() const { return num_waiting == workers.size(); }

  void work_until_stopped() {
    of_this_thread = this;
    std::unique_lock lock(mutex);
    for (;;) {
      work.wait(lock, [this] { return is_stopping || !jobs.empty(); });
      if (jobs.empty()) return;
      run_one(*jobs.front(), lock);
    }
  }

  void stop() {
    {
      const std::lock_guard lock(mutex);
      is_stopping = true;
    }
    work.notify_all();
    for (std::thread& worker : workers) worker.join();
  }

  // Runs the next body of a job. The lock is held on entry and on return.
  void run_one(Job& job, std::unique_lock<std::mutex>& lock) {
    const int64_t index = job.num_begun++;
    if (job.num_begun == job.count) std::erase(jobs, &job);
    lock.unlock();
    std::exception_ptr error;
    try {
      job.body(index);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error && !job.error) {
      job.error = error;
      if (job.num_begun < job.count) {
        std::erase(jobs, &job);
        job.count = job.num_begun;
      }
    }
    if (++job.num_done == job.count) job.done.notify_one();
  }
};

ThreadPool::ThreadPool(int num_threads)
    : num_threads_(num_threads > 0 ? num_threads : detail::num_cores()),
      state_(std::make_unique<State>()) {
  CROSSDOCK_CHECK(num_threads >= 0 && num_threads <= kMaxThreads, "num_threads must be in [0, ",
                  kMaxThreads, "], got ", num_threads);
  if (num_threads_ == 1) return;
  state_->workers.reserve(static_cast<size_t>(num_threads_));
  try {
    for (int i = 0; i < num_threads_; ++i) {
      const std::string purpose = concat("a pool of ", num_threads_, ", which has ", i,
                                         "; CROSSDOCK_THREADS sets the size of the default pool");
      state_->workers.push_back(start_thread(purpose, [this] { state_->work_until_stopped(); }));
    }
  } catch (...) {
    state_->stop();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  if (state_->is_of_parent()) {
    static_cast<void>(state_.release());  // there is nothing to join
  } else {
    state_->stop();
  }
}

void ThreadPool::parallel_for(int64_t count, const std::function<void(int64_t)>& body, Turn turn) {
  const bool has_no_threads = num_threads_ == 1 || state_->is_of_parent();
  if (has_no_threads || count <= 1 || State::of_this_thread != nullptr) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  Job job{.body = body, .count = count, .error = nullptr, .done = {}};
  std::unique_lock lock(state_->mutex);
  if (turn == Turn::kNext) {
    state_->jobs.push_front(&job);
  } else {
    state_->jobs.push_back(&job);
  }
  state_->work.notify_all();
  while (job.num_done < job.count) {
    const bool must_run_here = state_->all_workers_wait() && job.num_begun < job.count;
    if (must_run_here) {
      state_->run_one(job, lock);
    } else {
      job.done.wait(lock);
    }
  }
  if (job.error) std::rethrow_exception(job.error);
}

detail::PoolWait::PoolWait() : pool_(std::exchange(ThreadPool::State::of_this_thread, nullptr)) {
  if (pool_ == nullptr) return;
  const std::lock_guard lock(pool_->mutex);
  ++pool_->num_waiting;
  if (!pool_->all_workers_wait()) return;
  for (Job* job : pool_->jobs) job->done.notify_one();
}

detail::PoolWait::~PoolWait() {
  if (pool_ == nullptr) return;
  const std::lock_guard lock(pool_->mutex);
  --pool_->num_waiting;
  ThreadPool::State::of_this_thread = pool_;
}

std::shared_ptr<ThreadPool> ThreadPool::process_wide() {
  static const auto kPool = std::make_shared<ThreadPool>(num_threads_from_environment());
  return kPool;
}

}  // namespace crossdock
