#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <stdexcept>

#include "comm/polled/process_end.hpp"

namespace crossdock::comm {

/// A child process that waits to be ended.
class ChildProcess {
 public:
  ChildProcess() {
    std::array<int, 2> ends{};
    if (pipe(ends.data()) != 0) throw std::runtime_error("cannot make a pipe");
    pid_ = fork();
    if (pid_ == 0) {
      const ProcessIdentity self = identify_this_process();
      if (write(ends[1], &self, sizeof self) != sizeof self) _exit(1);
      while (true) ::pause();
    }
    close(ends[1]);  // otherwise read would not return without a child
    const bool is_known = read(ends[0], &identity_, sizeof identity_) == sizeof identity_;
    close(ends[0]);
    if (!is_known) throw std::runtime_error("cannot start a child");
  }
  ~ChildProcess() { end(); }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  const ProcessIdentity& identity() const { return identity_; }
  void end() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

 private:
  pid_t pid_ = 0;
  ProcessIdentity identity_;
};

}  // namespace crossdock::comm
