#pragma once

#include <cxxabi.h>

#include <functional>
#include <optional>
#include <string>

#include "comm/failure.hpp"
#include "crossdock/crossdock.h"
#include "crossdock/error.hpp"
#include "crossdock/group.hpp"
#include "crossdock/plan.hpp"

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

/// Keeps the current exception as the calling thread's last failure and returns its status.
/// REQUIRES: called inside a catch block.
crossdock_status keep_failure() noexcept;

/// Runs a function. An exception becomes a status.
template <typename Body>
crossdock_status caught(const Body& body) noexcept {
  try {
    body();
    return CROSSDOCK_OK;
  } catch (...) {
    return keep_failure();
  }
}

/// Runs the body of a C API function.
template <typename Body>
crossdock_status guarded(const Body& body) noexcept {
  const RunningCall running;
  return caught(body);
}

/// The error code for a status that a failed callback returned. Statuses that stand for an error
/// after which a group stays usable become kCommunication.
ErrorCode code_of(crossdock_status status);

/// The reason that a failed callback gave with crossdock_set_callback_error; clears it.
std::string take_callback_error();

/// Throws Error(kInvalidArgument) if the caller refused this call with crossdock_refuse_next_call.
void check_not_refused();

/// The collective call that arguments belong to.
struct Call {
  Group& group;
  const char* operation;
  uint64_t subject = 0;  // id of the plan that the call uses
  /// How its ranks agree; by default in the group.
  std::function<void(const Proposal&)> agree = nullptr;
};

/// A call of a dispatcher or a layer, whose ranks may run ahead if the tensors are on GPUs. `plan`:
/// the one it uses; if there is none, ranks run ahead if they did so before.
template <typename Caller>
Call call_of(Caller& caller, Group& group, const char* operation, const Plan& plan) {
  const Device device = plan.valid() ? plan.device() : Device{.kind = DeviceKind::kCuda};
  return {.group = group,
          .operation = operation,
          .subject = plan.valid() ? plan.id() : 0,
          .agree = [&caller, device](const Proposal& proposal) { caller.agree(proposal, device); }};
}

/// Converts the arguments of a collective call. Returns why that is impossible, if so.
template <typename Convert>
std::optional<Error> conversion_refusal(const Convert& body) {
  return refusal_of([&] {
    check_not_refused();
    body();
  });
}

/// Converts the arguments of a collective call. If they cannot be converted, this rank refuses the
/// call, so all ranks return the same error instead of waiting for this one.
template <typename Convert>
void convert(const Call& call, const Convert& body) {
  const std::optional<Error> refusal = conversion_refusal(body);
  if (!refusal) return;
  const Proposal proposal{
      .operation = call.operation, .subject = call.subject, .refusal = &*refusal};
  if (call.agree) {
    call.agree(proposal);
  } else {
    call.group.agree(proposal);
  }
}

}  // namespace crossdock::capi
