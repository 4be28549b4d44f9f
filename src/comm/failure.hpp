#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "crossdock/error.hpp"
#include "crossdock/extend/communicator.hpp"

namespace crossdock::comm {

/// Why a communicator is broken, in a form that can travel to the other ranks. All ranks end with
/// the same culprit, operation and sequence.
struct Failure {
  ErrorCode code = ErrorCode::kPeerFailed;
  int culprit = -1;
  int reporter = -1;  // rank whose words `text` are; -1: nobody's in particular
  uint64_t sequence = 0;
  std::string operation;
  std::string text;
};

/// `reporter` has waited for `culprit` to arrive at an operation, or to go on with it.
struct LateRank {
  int culprit = -1;
  int reporter = -1;
  std::chrono::nanoseconds waited{};
  bool has_arrived = false;
};
Failure late_failure(const LateRank& late, const WaitContext& wait);

/// `culprit` will not come any more.
Failure left_failure(int culprit, std::string_view reason, const WaitContext& wait);

/// What `rank` gave up with. Without a culprit in its context it is `rank` itself.
Failure failure_from(const Error& cause, int rank);

/// What rank `rank` of `size` throws.
Error to_error(const Failure& failure, int rank, int size);

/// The same text for the life of the process, as ErrorContext::operation must be.
const char* interned(std::string_view name);

/// The reason given when a rank says goodbye without one.
inline constexpr std::string_view kPlainLeave = "it returned or was destroyed";
/// The reason of a rank whose work is done.
inline constexpr std::string_view kReturned = "it returned";

}  // namespace crossdock::comm
