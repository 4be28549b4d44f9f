#include "dispatch/cuda/channel_ranks.hpp"

#include <algorithm>
#include <optional>
#include <vector>

#include "comm/attachment.hpp"
#include "comm/cuda/gpu_reach.hpp"
#include "comm/failure.hpp"
#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "dispatch/path.hpp"

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

namespace crossdock {

GpuRelation agree_on_gpus(const PathContext& context, Device device) {
  Group& group = context.group;
  std::vector<std::byte> own;
  const std::optional<Error> refusal = refusal_of([&] {
    if (context.refusal) throw *context.refusal;
    const cuda::CallGuard guard(cuda::existing_device(device.index));
    cuda::GpuReach reach = cuda::reach_of(device.index);
    const comm::GpuPretences& pretences = comm::gpu_pretences_of(group);
    reach.reaches_nobody = pretences.reaches_nobody;
    // The last character of an address is unused.
    if (pretences.peers_are_elsewhere) reach.gpu.back() = static_cast<char>(group.rank());
    own = reach.to_bytes();
  });
  const Agreement all =
      group.agree({.operation = "plan",
                   .config = concat(context.config_text, ";weights=fp32;device=cuda"),
                   .body = own,
                   .refusal = as_refusal(refusal)});
  std::vector<cuda::GpuReach> ranks;
  ranks.reserve(static_cast<size_t>(group.size()));
  for (int p = 0; p < group.size(); ++p) {
    ranks.push_back(cuda::GpuReach::from_bytes(all.body(p)));
  }
  // Thread ranks use each other's memory even if they simulate several nodes.
  const bool is_one_machine = group.communicator().shares_address_space();
  const Topology reached = is_one_machine ? Topology::single_node(group.size()) : group.topology();
  return {.reach_each_other = cuda::reach_each_other(ranks, reached.node_of_rank),
          .are_several = std::ranges::any_of(
              ranks, [&](const cuda::GpuReach& rank) { return rank.gpu != ranks[0].gpu; }),
          .are_shared = cuda::share_gpus(ranks, reached.node_of_rank)};
}

}  // namespace crossdock
