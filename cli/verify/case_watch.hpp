#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

namespace crossdock::cli {

/// Says on standard error which case was running if this process crashes, or ends it with status 1
/// and says so if a case does not end within the limit. One at a time.
class CaseWatch {
 public:
  /// How to reproduce a case, besides its number.
  struct Advice {
    uint64_t seed = 0;
    std::string options{};  // " --ranks 8 ...": those on which cases depend
  };
  CaseWatch(Advice advice, std::chrono::seconds limit);
  ~CaseWatch();
  CaseWatch(const CaseWatch&) = delete;
  CaseWatch& operator=(const CaseWatch&) = delete;

  /// The case that begins now.
  void begin(int64_t number);
  /// No case runs from now until the next begins; the limit does not apply.
  void pause();

 private:
  void watch(std::chrono::seconds limit);

  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_over_ = false;
  bool is_running_ = false;
  int64_t num_changes_ = 0;  // calls of begin and pause
  std::thread watcher_;
};

}  // namespace crossdock::cli
