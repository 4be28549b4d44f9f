#include "cost/route_sums.hpp"

#include <algorithm>
#include <map>
#include <numeric>

#include "core/tensor_memory.hpp"
#include "plan/placement.hpp"

namespace crossdock {
namespace {

// sum - part, or 0 if rounding makes it negative.
double difference(double sum, double part) {
  return std::max(0.0, sum - part);
}

double most(const std::vector<double>& a, const std::vector<double>& b) {
  return std::max(*std::max_element(a.begin(), a.end()), *std::max_element(b.begin(), b.end()));
}

struct NodeMap {
  std::vector<int64_t> node_sizes;  // [nodes]
  std::vector<int64_t> places;      // [P] index of a rank on its node

  explicit NodeMap(const Topology& topology)
      : node_sizes(index(topology.num_nodes), 0), places(topology.node_of_rank.size()) {
    for (size_t rank = 0; rank < places.size(); ++rank) {
      places[rank] = node_sizes[index(topology.node_of_rank[rank])]++;
    }
  }
};

// Every rank sends `rows_to_rank` [P].
LinkFlow flow_from_equal_sources(const std::vector<double>& rows_to_rank, const Topology& topology,
                                 const NodeMap& nodes) {
  const size_t P = rows_to_rank.size();
  std::vector<double> rows_to_node(nodes.node_sizes.size(), 0.0);
  for (size_t rank = 0; rank < P; ++rank) {
    rows_to_node[index(topology.node_of_rank[rank])] += rows_to_rank[rank];
  }
  const double all = std::accumulate(rows_to_node.begin(), rows_to_node.end(), 0.0);
  LinkFlow flow(P);
  for (size_t rank = 0; rank < P; ++rank) {
    const size_t node = index(topology.node_of_rank[rank]);
    const auto node_size = static_cast<double>(nodes.node_sizes[node]);
    flow.kept[rank] = rows_to_rank[rank];
    flow.sent_within[rank] = difference(rows_to_node[node], rows_to_rank[rank]);
    flow.sent_between[rank] = difference(all, rows_to_node[node]);
    flow.received_within[rank] = (node_size - 1.0) * rows_to_rank[rank];
    flow.received_between[rank] = (static_cast<double>(P) - node_size) * rows_to_rank[rank];
  }
  return flow;
}

std::vector<double> scaled(std::vector<double> values, double factor) {
  for (double& value : values) value *= factor;
  return values;
}

// Adds the routes of one token to the sums; `owners` are the ranks of its experts.
void count_token(RouteSums& sums, const Topology& topology, const Gateway& gateway, int source,
                 std::vector<int>& owners) {
  const int own_node = topology.node_of_rank[index(source)];
  std::vector<int> reached_nodes;
  bool reaches_own_node = false;
  for (const int owner : owners) {
    sums.routes.add(topology, source, owner, 1.0);
    const int node = topology.node_of_rank[index(owner)];
    reaches_own_node = reaches_own_node || node == own_node;
    if (node == own_node) continue;
    const int via = gateway(source, owner);
    if (std::find(reached_nodes.begin(), reached_nodes.end(), node) == reached_nodes.end()) {
      sums.nodes.add(topology, source, via, 1.0);
      reached_nodes.push_back(node);
    }
    sums.nodes.add(topology, via, owner, 1.0);
  }
  std::sort(owners.begin(), owners.end());
  owners.erase(std::unique(owners.begin(), owners.end()), owners.end());
  for (const int owner : owners) sums.ranks.add(topology, source, owner, 1.0);
  if (reaches_own_node) sums.reach_own_node[index(source)] += 1.0;
}

}  // namespace

LinkFlow::LinkFlow(size_t num_ranks)
    : kept(num_ranks, 0.0),
      sent_within(num_ranks, 0.0),
      sent_between(num_ranks, 0.0),
      received_within(num_ranks, 0.0),
      received_between(num_ranks, 0.0) {}

void LinkFlow::add(const Topology& topology, int from, int to, double rows) {
  const size_t f = index(from);
  const size_t t = index(to);
  if (f == t) {
    kept[f] += rows;
  } else if (topology.node_of_rank[f] == topology.node_of_rank[t]) {
    sent_within[f] += rows;
    received_within[t] += rows;
  } else {
    sent_between[f] += rows;
    received_between[t] += rows;
  }
}

LinkFlow LinkFlow::reversed() const {
  LinkFlow flow = *this;
  std::swap(flow.sent_within, flow.received_within);
  std::swap(flow.sent_between, flow.received_between);
  return flow;
}

double LinkFlow::total_sent(size_t rank) const {
  return kept[rank] + sent_within[rank] + sent_between[rank];
}

double LinkFlow::total_received(size_t rank) const {
  return kept[rank] + received_within[rank] + received_between[rank];
}

double LinkFlow::most_within() const {
  return most(sent_within, received_within);
}

double LinkFlow::most_between() const {
  return most(sent_between, received_between);
}

std::vector<double> sources_of_gateways(const Topology& topology) {
  const NodeMap nodes(topology);
  std::map<int64_t, int64_t> nodes_of_size;
  for (const int64_t size : nodes.node_sizes) ++nodes_of_size[size];
  std::vector<double> sources(nodes.places.size(), 0.0);
  for (size_t rank = 0; rank < sources.size(); ++rank) {
    const int64_t own_size = nodes.node_sizes[index(topology.node_of_rank[rank])];
    for (const auto& [size, num_nodes] : nodes_of_size) {
      const int64_t other_nodes = num_nodes - (size == own_size ? 1 : 0);
      // Places p < size with p % own_size == place of this rank.
      const int64_t matching = (size - nodes.places[rank] + own_size - 1) / own_size;
      sources[rank] += static_cast<double>(other_nodes * std::max<int64_t>(matching, 0));
    }
  }
  return sources;
}

RouteSums expected_sums(const TokenSpread& spread, const Topology& topology, int64_t tokens) {
  const auto T = static_cast<double>(tokens);
  const size_t P = spread.routes_to_rank.size();
  const NodeMap nodes(topology);
  RouteSums sums;
  sums.tokens.assign(P, T);
  sums.routes = flow_from_equal_sources(scaled(spread.routes_to_rank, T), topology, nodes);
  sums.ranks = flow_from_equal_sources(scaled(spread.reaches_rank, T), topology, nodes);

  const double all_nodes =
      std::accumulate(spread.reaches_node.begin(), spread.reaches_node.end(), 0.0);
  const std::vector<double> sources = sources_of_gateways(topology);
  sums.nodes = LinkFlow(P);
  for (size_t rank = 0; rank < P; ++rank) {
    const size_t node = index(topology.node_of_rank[rank]);
    const auto far_sources = static_cast<double>(P) - static_cast<double>(nodes.node_sizes[node]);
    const double routes_here = T * spread.routes_to_rank[rank];
    const double routes_to_node = sums.routes.kept[rank] + sums.routes.sent_within[rank];
    sums.reach_own_node.push_back(T * spread.reaches_node[node]);
    sums.nodes.sent_between[rank] = T * difference(all_nodes, spread.reaches_node[node]);
    sums.nodes.received_between[rank] = T * sources[rank] * spread.reaches_node[node];
    sums.nodes.kept[rank] = sources[rank] * routes_here;
    sums.nodes.sent_within[rank] = sources[rank] * difference(routes_to_node, routes_here);
    sums.nodes.received_within[rank] = (far_sources - sources[rank]) * routes_here;
  }
  return sums;
}

RouteSums counted_sums(std::span<const CountedRoutes> ranks, std::span<const int32_t> owner,
                       const Topology& topology) {
  const size_t P = ranks.size();
  RouteSums sums{.tokens = {},
                 .reach_own_node = std::vector<double>(P, 0.0),
                 .routes = LinkFlow(P),
                 .ranks = LinkFlow(P),
                 .nodes = LinkFlow(P)};
  const Gateway gateway = gateway_per_node(topology);
  std::vector<int> owners;
  for (size_t source = 0; source < P; ++source) {
    const CountedRoutes& routes = ranks[source];
    const size_t K = index(routes.top_k);
    const size_t T = routes.expert_ids.size() / K;
    sums.tokens.push_back(static_cast<double>(T));
    for (size_t first = 0; first < routes.expert_ids.size(); first += K) {
      owners.clear();
      for (const int32_t e : routes.expert_ids.subspan(first, K)) {
        if (e >= 0) owners.push_back(owner[index(e)]);
      }
      count_token(sums, topology, gateway, static_cast<int>(source), owners);
    }
  }
  return sums;
}

}  // namespace crossdock
