#include "cli/processes/parent_watch.hpp"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <system_error>
#include <thread>

#include "cli/processes/rank_failure.hpp"

namespace crossdock::cli {
namespace {

constexpr std::chrono::milliseconds kPause{200};

// Not PR_SET_PDEATHSIG: it fires when the thread that started this process ends, and mpirun starts
// many ranks from threads that end early.
[[noreturn]] void end_with(pid_t parent) {
  // Readable once the parent has ended; -1 on kernels before 5.3.
  const auto process = static_cast<int>(syscall(SYS_pidfd_open, parent, 0));
  pollfd ended{.fd = process, .events = POLLIN, .revents = 0};
  while (getppid() == parent) {
    if (process < 0) {
      std::this_thread::sleep_for(kPause);
    } else if (poll(&ended, 1, -1) > 0) {
      break;
    }
  }
  _exit(EXIT_FAILURE);
}

}  // namespace

void watch_parent() {
  if (!is_rank_of_command()) return;
  try {
    std::thread(end_with, getppid()).detach();
  } catch (const std::system_error&) {
    // The rank can run without this thread.
  }
}

}  // namespace crossdock::cli
