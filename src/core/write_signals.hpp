#pragma once

#include <csignal>

namespace crossdock {

/// While one exists, a write of this thread past the limit on file sizes (ulimit -f) or into a pipe
/// without a reader fails with EFBIG or EPIPE instead of raising a signal that ends the process.
/// The process's signal handlers are left alone. Destruction keeps errno.
class WriteSignalBlock {
 public:
  WriteSignalBlock();
  ~WriteSignalBlock();
  WriteSignalBlock(const WriteSignalBlock&) = delete;
  WriteSignalBlock& operator=(const WriteSignalBlock&) = delete;

 private:
  sigset_t old_mask_{};
  sigset_t own_signals_{};  // those of the two signals that were not pending before
};

}  // namespace crossdock
