#pragma once

#include <cstdint>

namespace crossdock {

/// While it exists, no thread can be started in this process after the first `num_granted`. Only
/// one may exist at a time.
class MissingThreads {
 public:
  explicit MissingThreads(int64_t num_granted = 0);
  ~MissingThreads();
  MissingThreads(const MissingThreads&) = delete;
  MissingThreads& operator=(const MissingThreads&) = delete;
};

/// Threads that this process has started so far.
int64_t num_threads_started();

}  // namespace crossdock
