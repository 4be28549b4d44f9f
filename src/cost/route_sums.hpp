#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cost/top_k_odds.hpp"
#include "crossdock/extend/communicator.hpp"

namespace crossdock {

/// Rows on the links of every rank, [P] each.
struct LinkFlow {
  std::vector<double> kept;  // stays on its rank
  std::vector<double> sent_within;
  std::vector<double> sent_between;
  std::vector<double> received_within;
  std::vector<double> received_between;

  explicit LinkFlow(size_t num_ranks = 0);
  void add(const Topology& topology, int from, int to, double rows);
  /// The same rows the other way.
  LinkFlow reversed() const;
  /// Everything that a rank sends / gets, with what it keeps.
  double total_sent(size_t rank) const;
  double total_received(size_t rank) const;
};

/// What the routes of all ranks come to, as counted from a plan or as expected before there is one.
/// All costs are computed from these.
struct RouteSums {
  std::vector<double> tokens;          // [P] T of every rank
  std::vector<double> reach_own_node;  // [P] tokens of a rank with a route to its own node
  LinkFlow routes;                     // one row per route
  LinkFlow ranks;                      // one row per token and rank it has a route to
  /// One row per token and other node it has a route to (between), and the rows that its gateways
  /// there hand on, one per route (within; kept: to themselves). Routes to the own node are not in.
  LinkFlow nodes;
};

/// T tokens on every rank, each with this spread.
RouteSums expected_sums(const TokenSpread& spread, const Topology& topology, int64_t tokens);

/// [P] How many ranks of other nodes reach this rank's node through it, with one gateway per node
/// (gateway_per_node in relay.hpp).
std::vector<double> sources_of_gateways(const Topology& topology);

/// One rank's routes: [T, K] experts, -1 for none.
struct CountedRoutes {
  std::span<const int32_t> expert_ids;
  int64_t top_k = 0;
};

/// The routes of every rank as they are.
RouteSums counted_sums(std::span<const CountedRoutes> ranks, std::span<const int32_t> owner,
                       const Topology& topology);

}  // namespace crossdock
