#pragma once

#include "crossdock/planner.hpp"

namespace crossdock {

/// Throws Error(kInvalidArgument) that names the rule that inputs of the cost model break. Figures
/// of inputs that pass are finite and not negative.
void check_cost_inputs(const CostInputs& inputs);

}  // namespace crossdock
