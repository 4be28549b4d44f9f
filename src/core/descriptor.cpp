#include "core/descriptor.hpp"

#include <fcntl.h>

#include <array>
#include <cerrno>
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

}  // namespace crossdock
