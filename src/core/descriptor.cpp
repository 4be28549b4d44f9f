#include "core/descriptor.hpp"

#include <fcntl.h>

#include <array>
#include <cerrno>
#include <ctime>
#include <initializer_list>
#include <mutex>

namespace crossdock {
namespace {

// What the guards of all threads have opened for numbers that the program has closed.
struct Reserved {
  std::mutex mutex;
  int num_guards = 0;
  std::array<bool, STDERR_FILENO + 1> numbers{};
};

Reserved& reserved() {
  static Reserved one;
  return one;
}

}  // namespace

int above_standard(int number) {
  if (number < 0 || number > STDERR_FILENO) return number;
  const int moved = fcntl(number, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  const int error = errno;
  ::close(number);
  errno = error;
  return moved;
}

StandardDescriptorGuard::StandardDescriptorGuard() {
  const std::lock_guard lock(reserved().mutex);
  if (reserved().num_guards++ > 0) return;
  int number = 0;
  while ((number = ::open("/dev/null", O_PATH | O_CLOEXEC)) >= 0 && number <= STDERR_FILENO) {
    reserved().numbers[static_cast<size_t>(number)] = true;  // reading and writing fail there
  }
  if (number >= 0) ::close(number);
}

StandardDescriptorGuard::~StandardDescriptorGuard() {
  const std::lock_guard lock(reserved().mutex);
  if (--reserved().num_guards > 0) return;
  for (int number = 0; number <= STDERR_FILENO; ++number) {
    if (std::exchange(reserved().numbers[static_cast<size_t>(number)], false)) ::close(number);
  }
}

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
