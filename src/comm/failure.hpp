#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "crossdock/error.hpp"
#include "crossdock/extend/communicator.hpp"

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
