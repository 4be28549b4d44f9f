#pragma once

#include <span>

#include "crossdock/extend/communicator.hpp"

namespace crossdock::comm {

/// The topology of ranks whose nodes have these names [P], whatever numbers they are.
Topology number_nodes(std::span<const int> node_names);

/// The topology of a subgroup; `members` are ranks of the whole.
Topology restrict_to(const Topology& topology, std::span<const int> members);

}  // namespace crossdock::comm
