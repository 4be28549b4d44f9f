#pragma once

#include "crossdock/moe_layer.hpp"

namespace crossdock {

// Each throws Error(kInvalidArgument) where an output overlaps an input or another output.

void check_outputs(const MoeForwardArgs& args);
void check_outputs(const MoeBackwardArgs& args);
void check_outputs(const MoeBackwardDwArgs& args);

}  // namespace crossdock
