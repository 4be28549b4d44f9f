#pragma once

#include <csignal>

namespace crossdock {

/// While one exists, a write by this thread beyond the file size limit (ulimit -f) or to a pipe
/// without a reader fails with EFBIG or EPIPE instead of raising a signal that ends the process.
/// The process's signal handlers are left alone. The destructor preserves errno.
class WriteSignalBlock {
 public:
  WriteSignalBlock();
  ~WriteSignalBlock();
  WriteSignalBlock(const WriteSignalBlock&) = delete;
  WriteSignalBlock& operator=(const WriteSignalBlock&) = delete;

 private:
  sigset_t old_mask_{};
  sigset_t own_signals_{};  // which of the two signals were not pending before
};

}  // namespace crossdock
