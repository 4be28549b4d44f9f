#include "cost/strategy_flow.hpp"

#include <numeric>

namespace crossdock {
namespace {

// Every token to every other rank.
LinkFlow flow_of_all_tokens(const RouteSums& sums, const Topology& topology) {
  const size_t P = sums.tokens.size();
  std::vector<double> node_tokens(static_cast<size_t>(topology.num_nodes), 0.0);
  std::vector<double> node_sizes(node_tokens.size(), 0.0);
  for (size_t rank = 0; rank < P; ++rank) {
    node_tokens[static_cast<size_t>(topology.node_of_rank[rank])] += sums.tokens[rank];
    node_sizes[static_cast<size_t>(topology.node_of_rank[rank])] += 1.0;
  }
  const double all = std::accumulate(node_tokens.begin(), node_tokens.end(), 0.0);
  LinkFlow flow(P);
  for (size_t rank = 0; rank < P; ++rank) {
    const auto node = static_cast<size_t>(topology.node_of_rank[rank]);
    flow.kept[rank] = sums.tokens[rank];
    flow.sent_within[rank] = sums.tokens[rank] * (node_sizes[node] - 1.0);
    flow.sent_between[rank] = sums.tokens[rank] * (static_cast<double>(P) - node_sizes[node]);
    flow.received_within[rank] = node_tokens[node] - sums.tokens[rank];
    flow.received_between[rank] = all - node_tokens[node];
  }
  return flow;
}

// Inside the node as the routes go, between nodes as the copies go.
LinkFlow flow_with_copies(const LinkFlow& routes, const LinkFlow& copies) {
  LinkFlow flow = routes;
  flow.sent_between = copies.sent_between;
  flow.received_between = copies.received_between;
  return flow;
}

// Gateways hand on what they get, or fetch what they return.
void add_handed_on(const LinkFlow& nodes, LinkFlow& flow) {
  for (size_t rank = 0; rank < flow.kept.size(); ++rank) {
    flow.sent_within[rank] += nodes.sent_within[rank];
    flow.received_within[rank] += nodes.received_within[rank];
  }
}

LinkFlow dispatch_flow(StrategyKind kind, const RouteSums& sums, const Topology& topology) {
  switch (kind) {
    case StrategyKind::kAllgather:
      return flow_of_all_tokens(sums, topology);
    case StrategyKind::kAlltoall:
      return sums.routes;
    case StrategyKind::kDirect:
      return flow_with_copies(sums.routes, sums.ranks);
    case StrategyKind::kHierarchical:
      break;
  }
  LinkFlow flow = flow_with_copies(sums.routes, sums.nodes);
  add_handed_on(sums.nodes, flow);
  return flow;
}

// Every row comes back; between nodes it leaves from the gateway.
LinkFlow combine_flow(StrategyKind kind, const RouteSums& sums) {
  LinkFlow flow = sums.routes;
  if (kind == StrategyKind::kHierarchical) {
    add_handed_on(sums.nodes, flow);
    for (size_t rank = 0; rank < flow.kept.size(); ++rank) {
      flow.received_between[rank] = sums.nodes.kept[rank] + sums.nodes.sent_within[rank];
    }
  }
  return flow.reversed();
}

}  // namespace

LinkFlow flow_of(StrategyKind kind, Movement movement, const RouteSums& sums,
                 const Topology& topology) {
  switch (movement) {
    case Movement::kDispatch:
    case Movement::kGradients:
      return dispatch_flow(kind, sums, topology);
    case Movement::kCombine:
      return combine_flow(kind, sums);
    case Movement::kPartialSums:
      break;
  }
  if (kind == StrategyKind::kAlltoall) return sums.ranks.reversed();
  return dispatch_flow(kind, sums, topology).reversed();
}

}  // namespace crossdock
