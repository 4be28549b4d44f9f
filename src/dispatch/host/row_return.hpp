#pragma once

#include "crossdock/extend/strategy.hpp"

namespace crossdock {

/// The exact way back: every row travels to its source by an all-to-all and is summed there in slot
/// order, straight out of where it arrived.
void return_and_sum(const Exchange& exchange, const GatherSumArgs& args);

}  // namespace crossdock
