#include <algorithm>
#include <optional>
#include <vector>

#include "comm/agreed_failure.hpp"
#include "comm/cuda/gpu_reach.hpp"
#include "comm/cuda/peer_memory.hpp"
#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "dispatch/device_path.hpp"

namespace crossdock {

GpuRelation agree_on_gpus(const PathContext& context, Device device) {
  Group& group = context.group;
  std::vector<std::byte> own;
  const std::optional<Error> refusal = refusal_of([&] {
    if (context.refusal) throw *context.refusal;
    const cuda::CallGuard guard(cuda::existing_device(device.index));
    cuda::GpuReach reach = cuda::reach_of(device.index);
    // The last character of an address is unused.
    if (cuda::PeersOnOtherGpus::are_pretended()) reach.gpu.back() = static_cast<char>(group.rank());
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
