#pragma once

#include <optional>

#include "crossdock/error.hpp"
#include "crossdock/group.hpp"

namespace crossdock {

/// The current exception as an Error for the other ranks. REQUIRES: called inside a catch block.
Error current_error();

/// Runs the checks and allocations that a rank makes before the ranks agree. Returns the error if
/// they fail, for as_refusal.
template <typename Body>
std::optional<Error> refusal_of(const Body& body) {
  try {
    body();
    return std::nullopt;
  } catch (...) {
    return current_error();
  }
}

/// The error for Proposal::refusal: null if there is none. Valid as long as `error`.
inline const Error* as_refusal(const std::optional<Error>& error) {
  return error ? &*error : nullptr;
}
const Error* as_refusal(const std::optional<Error>&& error) = delete;

/// Runs the work after an agreement. Peers may already be waiting for this rank's data, so a
/// failure poisons the group and is thrown as the group's error.
template <typename Body>
void run_agreed(Group& group, const Body& body) {
  try {
    body();
  } catch (...) {
    group.fail(current_error());
    group.check();
  }
}

}  // namespace crossdock
