#pragma once

#include <functional>

#include "crossdock/extend/communicator.hpp"

namespace crossdock {

/// The rank through which rank `source` sends to rank `destination` on another node.
using Gateway = std::function<int(int source, int destination)>;

/// Every destination is its own gateway: a token with several experts on one rank is sent once.
int gateway_is_destination(int source, int destination);

/// One gateway per (source, node): the rank whose index on its node is the source's index on its
/// own (modulo the node's size). This spreads the work over all ranks.
Gateway gateway_per_node(const Topology& topology);

}  // namespace crossdock
