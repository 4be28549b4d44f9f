#include "core/write_signals.hpp"

#include <cerrno>
#include <ctime>
#include <initializer_list>

namespace crossdock {

WriteSignalBlock::WriteSignalBlock() {
  sigset_t pending;
  sigpending(&pending);
  sigset_t blocked;
  sigemptyset(&blocked);
  sigemptyset(&own_signals_);
  for (const int signal : {SIGXFSZ, SIGPIPE}) {
    sigaddset(&blocked, signal);
    if (sigismember(&pending, signal) == 0) sigaddset(&own_signals_, signal);
  }
  pthread_sigmask(SIG_BLOCK, &blocked, &old_mask_);
}

WriteSignalBlock::~WriteSignalBlock() {
  const int kept_errno = errno;
  const timespec no_wait{};
  // A signal that is still pending when the mask is restored would be delivered after all.
  while (sigtimedwait(&own_signals_, nullptr, &no_wait) > 0 || errno == EINTR) {
  }
  pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr);
  errno = kept_errno;
}

}  // namespace crossdock
