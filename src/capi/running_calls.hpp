#pragma once

#include <cxxabi.h>

namespace crossdock::capi {

/// Stands for a call of the C API that is running. Does not return in a thread other than the one
/// that called crossdock_end_calls.
class RunningCall {
 public:
  RunningCall() noexcept;
  ~RunningCall();
  RunningCall(const RunningCall&) = delete;
  RunningCall& operator=(const RunningCall&) = delete;
};

/// Whether crossdock_end_calls has been called.
bool have_calls_ended() noexcept;

/// Holds the calling thread until the process exits.
[[noreturn]] void hold_thread() noexcept;

/// Calls a function of the caller. The runtime of another language may end the thread in it, as
/// Python does while it exits. Unwinding would pass through functions that must not throw and
/// destroy what other threads use, so the thread is held instead.
template <typename Function>
auto call_back(const Function& function) {
  try {
    return function();
  } catch (const abi::__forced_unwind&) {
    hold_thread();
  }
}

}  // namespace crossdock::capi
