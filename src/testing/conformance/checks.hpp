#pragma once

#include <vector>

#include "crossdock/testing/conformance.hpp"

/// The parts of list_checks().
namespace crossdock::conformance {

/// Several plans, batches, widths and groups at once.
std::vector<Check> list_scenarios();

/// Known rows, starts and sums of small cases, written down by hand.
std::vector<Check> list_worked_vectors();

/// Inputs that one rank has wrong.
std::vector<Check> list_bad_inputs();

/// Ranks that are configured differently or do different things.
std::vector<Check> list_mismatches();

}  // namespace crossdock::conformance
