#pragma once

#include <functional>
#include <string>
#include <vector>

#include "crossdock/testing/conformance.hpp"

namespace crossdock::conformance {

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
