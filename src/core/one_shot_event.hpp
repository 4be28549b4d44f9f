#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace crossdock {

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
