#pragma once

#include <memory>

#include "crossdock/extend/strategy.hpp"
#include "dispatch/strategies/direct/relay.hpp"

namespace crossdock {

/// Every row is written straight into its final place in the receiver's memory, and read where it
/// lies on the way back. Between nodes a token crosses once per destination rank.
std::unique_ptr<Strategy> make_direct();

/// As direct, but between nodes a token crosses once per destination node and is forwarded inside
/// it; with partial sums one row per node comes back.
std::unique_ptr<Strategy> make_hierarchical();

/// What one of the two keeps in a plan of its own: the copies that cross between nodes.
const Relay& relay_of(const Plan& plan);

}  // namespace crossdock
