#pragma once

#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cost/step_sizes.hpp"
#include "crossdock/crossdock.hpp"
#include "plan/placement.hpp"

namespace crossdock {

/// Routes of all ranks, known to each of them.
struct Routes {
  DispatchConfig config;
  Topology topology;
  std::vector<std::vector<int32_t>> ids;  // [P][T, K]
  DType dtype = DType::kF32;              // of the rows

  int num_ranks() const { return static_cast<int>(ids.size()); }
};

/// K distinct experts per token, equally likely; with `holes`, some slots are empty and rank r has
/// 2 r fewer tokens.
inline Routes random_routes(const DispatchConfig& config, const Topology& topology, int64_t tokens,
                            bool holes) {
  Routes routes{.config = config, .topology = topology, .ids = {}};
  std::mt19937 random(20);
  std::vector<int32_t> experts(static_cast<size_t>(config.num_experts));
  std::iota(experts.begin(), experts.end(), 0);
  for (size_t rank = 0; rank < topology.node_of_rank.size(); ++rank) {
    std::vector<int32_t> ids;
    const int64_t T = tokens - (holes ? 2 * static_cast<int64_t>(rank) : 0);
    for (int64_t t = 0; t < T; ++t) {
      std::shuffle(experts.begin(), experts.end(), random);
      for (int64_t k = 0; k < config.top_k; ++k) {
        ids.push_back(holes && random() % 5 == 0 ? -1 : experts[static_cast<size_t>(k)]);
      }
    }
    routes.ids.push_back(std::move(ids));
  }
  return routes;
}

inline RouteSums count(const Routes& routes) {
  std::vector<CountedRoutes> counted;
  for (const auto& ids : routes.ids) counted.push_back({ids, routes.config.top_k});
  const Placement placement = make_placement(routes.config, routes.num_ranks());
  return counted_sums(counted, placement.owner, routes.topology);
}

/// Traffic of a rank in one dispatch and one combine.
struct Sent {
  Traffic dispatch;
  Traffic combine;
};

inline Traffic operator-(const Traffic& a, const Traffic& b) {
  Traffic difference;
  difference.bytes_within_node = a.bytes_within_node - b.bytes_within_node;
  difference.bytes_between_nodes = a.bytes_between_nodes - b.bytes_between_nodes;
  return difference;
}

/// Dispatch and combine. Collective.
inline Sent send_once(Group& group, const Routes& routes, const std::string& strategy,
                      int64_t num_chunks = 1) {
  const auto& ids = routes.ids[static_cast<size_t>(group.rank())];
  const int64_t K = routes.config.top_k;
  const int64_t T = std::ssize(ids) / K;
  const int64_t D = routes.config.width;
  const std::vector<float> weights(ids.size(), 1.0f);
  const Buffer x(T * D * size_of(routes.dtype));  // any values
  Dispatcher dispatcher(group, routes.config, strategy);
  const Plan plan = dispatcher.plan(Routing{.expert_ids = ConstTensorView(ids.data(), {T, K}),
                                            .weights = ConstTensorView(weights.data(), {T, K})});
  const Traffic before = group.communicator().traffic();
  DispatchArgs args;
  args.x = x.view(routes.dtype, {T, D});
  args.num_chunks = num_chunks;
  const DispatchResult rows = dispatcher.dispatch(plan, args);
  const Traffic between = group.communicator().traffic();
  static_cast<void>(dispatcher.combine(plan, rows.rows.view));
  const Traffic after = group.communicator().traffic();
  return {between - before, after - between};
}

/// The traffic of the rows alone: the traffic of a step without tokens, which consists of the
/// agreements, is subtracted. Collective.
inline Sent send_payload(Group& group, const Routes& routes, const std::string& strategy,
                         int64_t num_chunks = 1) {
  Routes empty = routes;
  for (auto& ids : empty.ids) ids.clear();
  const Sent sent = send_once(group, routes, strategy, num_chunks);
  const Sent overhead = send_once(group, empty, strategy, num_chunks);
  return {sent.dispatch - overhead.dispatch, sent.combine - overhead.combine};
}

}  // namespace crossdock
