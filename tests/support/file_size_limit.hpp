#pragma once

#include <sys/resource.h>

namespace crossdock::test {

/// While one exists, files of this process cannot grow beyond this many bytes (ulimit -f).
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t num_bytes) {
    getrlimit(RLIMIT_FSIZE, &old_);
    const rlimit lower{.rlim_cur = num_bytes, .rlim_max = old_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &lower);
  }
  ~FileSizeLimit() { setrlimit(RLIMIT_FSIZE, &old_); }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit old_{};
};

}  // namespace crossdock::test
