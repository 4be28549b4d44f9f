#pragma once

#include <cstdint>

#include "crossdock/planner.hpp"

namespace crossdock {

/// Largest number of tokens per rank that costs are computed for.
inline constexpr int64_t kMaxTokens = int64_t{1} << 31;

/// Throws an Error(kInvalidArgument) that names the rule that the cost model's inputs break. The
/// costs of valid inputs are finite and not negative.
void check_cost_inputs(const CostInputs& inputs);

}  // namespace crossdock
