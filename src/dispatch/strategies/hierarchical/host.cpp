#include <vector>

#include "dispatch/strategies/direct/direct.hpp"
#include "dispatch/strategies/list.hpp"

namespace crossdock {
namespace {

// Adds the rows that gateways forward after receiving, or fetch before returning them.
void add_forwarded(const LinkFlow& nodes, LinkFlow& flow) {
  for (size_t rank = 0; rank < flow.kept.size(); ++rank) {
    flow.sent_within[rank] += nodes.sent_within[rank];
    flow.received_within[rank] += nodes.received_within[rank];
  }
}

class HierarchicalModel final : public RelayModel {
 public:
  LinkFlow flow(Movement movement, const RouteSums& sums,
                const Topology& /*topology*/) const override {
    if (movement == Movement::kCombine) return combine_flow(sums);
    LinkFlow flow = flow_with_copies(sums.routes, sums.nodes);
    add_forwarded(sums.nodes, flow);
    return is_scatter(movement) ? flow : flow.reversed();
  }

  bool joins_rows(Movement movement) const override { return is_scatter(movement); }

  std::string_view same_as(const Topology& topology) const override {
    return topology.num_nodes == 1 ? "direct" : "";
  }

 protected:
  const CopySizes& copies(const StepSizes& sizes) const override { return sizes.per_node; }

  std::vector<double> rows_per_token(Movement movement, const StrategyJob& job) const override {
    if (movement != Movement::kCombine) return job.spread.reaches_node;
    std::vector<double> routes(job.spread.reaches_node.size(), 0.0);
    for (size_t rank = 0; rank < job.spread.routes_to_rank.size(); ++rank) {
      const auto node = static_cast<size_t>(job.topology.node_of_rank[rank]);
      routes[node] += job.spread.routes_to_rank[rank];
    }
    return routes;
  }

 private:
  // Every row returns; between nodes, the gateway sends it.
  static LinkFlow combine_flow(const RouteSums& sums) {
    LinkFlow flow = sums.routes;
    add_forwarded(sums.nodes, flow);
    for (size_t rank = 0; rank < flow.kept.size(); ++rank) {
      flow.received_between[rank] = sums.nodes.kept[rank] + sums.nodes.sent_within[rank];
    }
    return flow.reversed();
  }
};

std::unique_ptr<Path> make_path_on_gpu(const PathContext& context, Device device) {
  if constexpr (CROSSDOCK_HAS_CUDA) return make_hierarchical_device_path(context, device);
  throw no_cuda_error();
}

int node_of(const Topology& topology, int rank) {
  return topology.node_of_rank[static_cast<size_t>(rank)];
}

}  // namespace

/// Like direct, but between nodes a token is sent once per destination node and forwarded within
/// it; with partial sums one row per node returns.
std::unique_ptr<Strategy> make_hierarchical() {
  static const HierarchicalModel kModel;
  return make_direct_variant({.name = "hierarchical",
                              .make_gateway = gateway_per_node,
                              .sum_group_of = node_of,
                              .make_device_path = make_path_on_gpu,
                              .model = kModel});
}

}  // namespace crossdock
