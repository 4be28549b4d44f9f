#include "core/threading.hpp"

#include <sched.h>

#include <thread>
#include <utility>

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

}  // namespace crossdock
