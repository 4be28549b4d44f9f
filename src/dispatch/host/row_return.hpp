#pragma once

#include "crossdock/extend/strategy.hpp"

namespace crossdock {

/// Exact gather_sum: an all-to-all returns every row to its source, which sums the rows in slot
/// order directly from the receive buffer.
void return_and_sum(const Exchange& exchange, const GatherSumArgs& args);

}  // namespace crossdock
