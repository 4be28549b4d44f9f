#pragma once

#include <functional>
#include <string>
#include <vector>

#include "crossdock/testing/conformance.hpp"

/// The parts of list_checks().
namespace crossdock::conformance {

/// Several plans, batches, widths and groups at once.
std::vector<Check> list_scenarios();

/// Partial sums of values that round.
std::vector<Check> list_partial_sums();

/// Every output in the caller's memory.
std::vector<Check> list_given_outputs();

/// Known rows, starts and sums of small cases, worked out by hand.
std::vector<Check> list_worked_vectors();

/// Bad inputs on one rank.
std::vector<Check> list_bad_inputs();

/// Ranks that are configured differently or make different calls.
std::vector<Check> list_mismatches();

/// The expected error.
struct ErrorExpectation {
  ErrorCode code = ErrorCode::kInvalidArgument;
  std::vector<std::string> words;  // required in its message
};

/// Runs `body`, which must throw the same expected error on every rank, and then a step that must
/// work on the same group. Collective.
void expect_same_error(Group& group, const StrategyFactory& strategy,
                       const ErrorExpectation& expected, const std::function<void()>& body,
                       Findings& findings);

}  // namespace crossdock::conformance
