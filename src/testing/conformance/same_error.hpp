#pragma once

#include <functional>
#include <string>
#include <vector>

#include "crossdock/testing/conformance.hpp"

namespace crossdock::conformance {

/// What an error must be.
struct ErrorExpectation {
  ErrorCode code = ErrorCode::kInvalidArgument;
  std::vector<std::string> words;  // that its message must have
};

/// Runs `body`, which must throw the same expected error on every rank, and then a step that must
/// work on the group that is left. Collective.
void expect_same_error(Group& group, const StrategyFactory& strategy,
                       const ErrorExpectation& expected, const std::function<void()>& body,
                       Findings& findings);

}  // namespace crossdock::conformance
