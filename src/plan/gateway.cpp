#include "plan/gateway.hpp"

#include <utility>
#include <vector>

namespace crossdock {

int gateway_is_destination(int /*source*/, int destination) {
  return destination;
}

Gateway gateway_per_node(const Topology& topology) {
  std::vector<std::vector<int>> nodes;
  std::vector<size_t> place(topology.node_of_rank.size());
  for (int node = 0; node < topology.num_nodes; ++node) {
    nodes.push_back(topology.ranks_of_node(node));
    for (size_t i = 0; i < nodes.back().size(); ++i) {
      place[static_cast<size_t>(nodes.back()[i])] = i;
    }
  }
  return [nodes = std::move(nodes), place = std::move(place), node_of = topology.node_of_rank](
             int source, int destination) {
    const std::vector<int>& node =
        nodes[static_cast<size_t>(node_of[static_cast<size_t>(destination)])];
    return node[place[static_cast<size_t>(source)] % node.size()];
  };
}

}  // namespace crossdock
