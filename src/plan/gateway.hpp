#pragma once

#include <functional>

#include "crossdock/extend/communicator.hpp"

namespace crossdock {

/// The rank through which rank `source` reaches rank `destination` of another node.
using Gateway = std::function<int(int source, int destination)>;

/// Every destination is its own gateway: a token with several experts on one rank crosses once.
int gateway_is_destination(int source, int destination);

/// One gateway per (source, node): the rank with the source's place in its own node, so that the
/// work is spread over all ranks.
Gateway gateway_per_node(const Topology& topology);

}  // namespace crossdock
