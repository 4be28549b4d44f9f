#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "crossdock/error.hpp"
#include "crossdock/extend/communicator.hpp"
#include "crossdock/group.hpp"

namespace crossdock::comm {

/// Why a communicator has failed, in a form that can be sent to the other ranks: all ranks report
/// the same culprit, operation and sequence.
struct Failure {
  ErrorCode code = ErrorCode::kPeerFailed;
  int culprit = -1;
  int reporter = -1;  // rank that wrote `text`; -1: no particular rank
  uint64_t sequence = 0;
  std::string operation;
  std::string text;
};

/// `reporter` has waited too long for `culprit` to arrive at an operation or to make progress in
/// it.
struct LateRank {
  int culprit = -1;
  int reporter = -1;
  std::chrono::nanoseconds waited{};
  bool has_arrived = false;
};
Failure late_failure(const LateRank& late, const WaitContext& wait);

/// `culprit` has left and will not arrive.
Failure left_failure(int culprit, std::string_view reason, const WaitContext& wait);

/// The error that made `rank` give up. If its context names no culprit, the culprit is `rank`
/// itself.
Failure failure_from(const Error& cause, int rank);

/// The error that rank `rank` of `size` throws.
Error to_error(const Failure& failure, int rank, int size);

/// A copy of the text that lives as long as the process, as ErrorContext::operation requires.
const char* interned(std::string_view name);

/// The reason for a rank that leaves without giving one.
inline constexpr std::string_view kPlainLeave = "it returned or was destroyed";
/// The reason for a rank whose work is complete.
inline constexpr std::string_view kReturned = "it returned";

}  // namespace crossdock::comm

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
