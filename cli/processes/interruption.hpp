#pragma once

#include <functional>
#include <mutex>
#include <thread>

namespace crossdock::cli {

/// Lets a command print what has finished when a signal (Ctrl-C, SIGTERM, SIGHUP) ends it. While
/// this object exists, such a signal calls `print`, and then ends the process as it would have
/// without. A second signal ends it at once. One at a time.
class Interruption {
 public:
  explicit Interruption(std::function<void()> print);
  ~Interruption();
  Interruption(const Interruption&) = delete;
  Interruption& operator=(const Interruption&) = delete;

  /// Changes what `print` reads; the two do not run at the same time.
  template <typename Change>
  void change(const Change& change) {
    const std::lock_guard lock(mutex_);
    change();
  }

 private:
  void watch();

  std::function<void()> print_;
  std::mutex mutex_;
  std::thread watcher_;
};

/// Ends this process by the signal, after what the Interruption prints, if there is one.
[[noreturn]] void end_by_signal(int signal);

}  // namespace crossdock::cli
