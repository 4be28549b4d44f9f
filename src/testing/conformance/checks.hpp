#pragma once

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

}  // namespace crossdock::conformance
