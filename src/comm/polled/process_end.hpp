#pragma once

#include <cstdint>
#include <functional>

namespace crossdock::comm {

/// Identifies a process, so others on its machine can see whether it is alive. Plain data,
/// exchanged during setup.
struct ProcessIdentity {
  uint64_t pid_space = 0;    // hash of machine and pid namespace: pids compare only within one
  uint64_t start_ticks = 0;  // distinguishes it from a later process with the same pid
  int32_t pid = 0;
  int32_t reserved = 0;
};

ProcessIdentity identify_this_process();

/// A number that is the same in all processes of this machine, whatever containers they run in, and
/// on no other machine; 0 if it is not known.
uint64_t identify_this_machine();

/// Whether `self` can see `process`. If not, nothing is known about it.
bool is_visible(const ProcessIdentity& process, const ProcessIdentity& self);

/// Whether a visible process has ended, reaped or not.
bool has_ended(const ProcessIdentity& process);

/// Calls `notice` if the process exits while this object exists, before MPI is finalised by
/// ensure_mpi_is_initialized. Other threads may still be running then. The exit of a forked child
/// does not call it.
class ExitNotice {
 public:
  explicit ExitNotice(std::function<void()> notice);
  ~ExitNotice();
  ExitNotice(const ExitNotice&) = delete;
  ExitNotice& operator=(const ExitNotice&) = delete;

 private:
  std::function<void()> notice_;
};

}  // namespace crossdock::comm
