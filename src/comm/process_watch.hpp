#pragma once

#include <cstdint>

namespace crossdock::comm {

/// A process, so that others on its machine can see whether it lives. Plain data; travels at
/// set-up.
struct ProcessIdentity {
  uint64_t pid_space = 0;    // hash of machine and pid namespace: pids compare only if it is alike
  uint64_t start_ticks = 0;  // tells it from a later process with the same pid
  int32_t pid = 0;
  int32_t reserved = 0;
};

ProcessIdentity identify_this_process();

/// Whether `process` can be seen from `self`. If not, nothing is known about it.
bool is_visible(const ProcessIdentity& process, const ProcessIdentity& self);

/// Whether a visible process has ended, reaped or not.
bool has_ended(const ProcessIdentity& process);

}  // namespace crossdock::comm
