#pragma once

#include <string>

#include "capi/running_calls.hpp"
#include "crossdock/crossdock.h"
#include "crossdock/error.hpp"

namespace crossdock::capi {

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

}  // namespace crossdock::capi
