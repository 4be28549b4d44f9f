#include "dispatch/cuda/channel_ranks.hpp"

#include <algorithm>

#include "core/check.hpp"

namespace crossdock::cuda {
namespace {

int largest_node(const Topology& topology) {
  size_t largest = 0;
  for (int node = 0; node < topology.num_nodes; ++node) {
    largest = std::max(largest, topology.ranks_of_node(node).size());
  }
  return static_cast<int>(largest);
}

}  // namespace

ChannelRanks::ChannelRanks(const Topology& topology, int rank, Waits waits)
    : slots_(topology.node_of_rank.size(), -1) {
  const auto node_of = [&](int r) { return topology.node_of_rank[static_cast<size_t>(r)]; };
  for (int r = 0; r < static_cast<int>(slots_.size()); ++r) {
    const bool is_near = waits == Waits::kForNode && node_of(r) == node_of(rank);
    if (r != rank && waits != Waits::kForAll && !is_near) continue;
    slots_[static_cast<size_t>(r)] = size();
    ranks_.push_back(r);
  }
}

void check_channel_size(const ChannelUse& use, const Topology& topology, const ChannelRanks& ranks,
                        int max_peers) {
  // With several nodes, one slot holds the rows received from other nodes.
  const int most_in_node = topology.num_nodes > 1 ? max_peers - 1 : max_peers;
  const int most = use.uses_rows_in_place ? most_in_node : max_peers;
  const char* advice = "give an NCCL communicator (DeviceOptions::nccl_comm)";
  if (use.waits == Waits::kForNode) {
    advice = "use alltoall or allgather, which exchange all rows through NCCL";
  } else if (use.uses_rows_in_place &&
             (topology.num_nodes <= 1 || largest_node(topology) > most_in_node)) {
    advice = "use alltoall or allgather with an NCCL communicator (DeviceOptions::nccl_comm)";
  }
  CROSSDOCK_CHECK(ranks.size() <= most, use.strategy, ": at most ", most,
                  " ranks can reach each other's GPU memory, got ", ranks.size(), "; ", advice);
}

}  // namespace crossdock::cuda
