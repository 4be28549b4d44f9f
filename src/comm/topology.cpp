#include <algorithm>
#include <map>

#include "core/check.hpp"
#include "crossdock/cuda.hpp"
#include "crossdock/extend/communicator.hpp"
#include "crossdock/group.hpp"

namespace crossdock {

Topology Topology::single_node(int size) {
  return uniform(size, size);
}

Topology Topology::uniform(int size, int ranks_per_node) {
  CROSSDOCK_CHECK(size > 0, "a group must have at least one rank, got ", size);
  CROSSDOCK_CHECK(ranks_per_node > 0, "ranks_per_node must be positive, got ", ranks_per_node);
  Topology topology;
  for (int rank = 0; rank < size; ++rank) topology.node_of_rank.push_back(rank / ranks_per_node);
  topology.num_nodes = topology.node_of_rank.back() + 1;
  return topology;
}

Topology Topology::from_node_ids(std::span<const int> node_ids) {
  Topology topology;
  std::map<int, int> number_of_id;
  for (const int id : node_ids) {
    const auto [entry, is_new] = number_of_id.try_emplace(id, topology.num_nodes);
    if (is_new) ++topology.num_nodes;
    topology.node_of_rank.push_back(entry->second);
  }
  return topology;
}

Topology Topology::subset(std::span<const int> members) const {
  std::vector<int> node_ids;
  for (const int rank : members) node_ids.push_back(node_of_rank[static_cast<size_t>(rank)]);
  return from_node_ids(node_ids);
}

std::vector<int> Topology::ranks_of_node(int node) const {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < node_of_rank.size(); ++rank) {
    if (node_of_rank[rank] == node) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

int cuda_device_of(Group& group) {
  const int num_devices = std::max(1, cuda_device_count());
  if (group.communicator().shares_address_space()) return group.rank() % num_devices;
  const std::vector<int>& nodes = group.topology().node_of_rank;
  const auto own = nodes.begin() + group.rank();
  return static_cast<int>(std::count(nodes.begin(), own, *own)) % num_devices;
}

}  // namespace crossdock
