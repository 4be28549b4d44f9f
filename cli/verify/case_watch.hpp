#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace crossdock::cli {

/// Says on standard error which case was running if this process crashes, or ends it with status 1
/// and says so if a case does not end within the limit. One at a time.
class CaseWatch {
 public:
  CaseWatch(uint64_t seed, std::chrono::seconds limit);
  ~CaseWatch();
  CaseWatch(const CaseWatch&) = delete;
  CaseWatch& operator=(const CaseWatch&) = delete;

  /// The case that begins now.
  void begin(int64_t number);

 private:
  void watch(std::chrono::seconds limit);

  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_over_ = false;
  int64_t num_begun_ = 0;
  std::thread watcher_;
};

}  // namespace crossdock::cli
