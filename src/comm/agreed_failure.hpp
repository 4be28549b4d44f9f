#pragma once

#include <optional>

#include "crossdock/error.hpp"
#include "crossdock/group.hpp"

namespace crossdock {

/// What an exception is to the other ranks. REQUIRES to be called inside a catch block.
Error current_error();

/// Runs what a rank checks and allocates before the ranks meet; a failure becomes its refusal, for
/// Proposal::rejection.
template <typename Body>
std::optional<Error> refusal_of(const Body& body) {
  try {
    body();
    return std::nullopt;
  } catch (...) {
    return current_error();
  }
}

/// Runs what follows an agreement. Peers may be waiting for this rank's data by then, so a failure
/// poisons the group, and is thrown as the group's.
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
