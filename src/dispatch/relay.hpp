#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "crossdock/strategy.hpp"
#include "dispatch/peer_rows.hpp"

namespace crossdock {

/// Where a relayed copy of a token ends.
struct RelayTarget {
  int64_t rank = 0;   // on the gateway's node
  int64_t row = 0;    // final row there
  double weight = 0;  // of the route
};

/// How tokens reach ranks on other nodes: one copy travels to a gateway, which fans it out inside
/// its node. Made once per plan.
struct Relay {
  // As a source: the copies that leave, by (gateway, token).
  std::vector<int64_t> copy_tokens;   // [copies]
  std::vector<int64_t> copy_offsets;  // [P + 1] by gateway
  // As a gateway: the copies that come, by (source, token), and their targets in slot order.
  std::vector<int64_t> arrival_offsets;  // [P + 1] by source
  std::vector<int64_t> target_offsets;   // [arrivals + 1]
  std::vector<RelayTarget> targets;
};

/// The rank through which rank `source` reaches rank `destination` of another node.
using Gateway = std::function<int(int source, int destination)>;

/// Every destination is its own gateway: a token with several experts on one rank crosses once.
int gateway_is_destination(int source, int destination);

/// One gateway per (source, node): the rank with the source's place in its own node, so that the
/// work is spread over all ranks.
Gateway gateway_per_node(const Topology& topology);

/// Tells the gateways what they will get. Collective.
Relay make_relay(const Exchange& exchange, const Gateway& gateway);

/// tokens [T, row_bytes] travel as `relay` says and are stored in the rows of the gateways' nodes.
/// Collective. REQUIRES: `peers` shows the rows of all ranks.
void relay_rows(const Exchange& exchange, const Relay& relay, const RowPart& part,
                const PeerRows& peers, size_t entry);

/// The way back with one partial row per copy: gateways sum the targets' rows in slot order (fp32,
/// or fp64 for fp64 rows). Returns the partial rows of this rank's copies, [copies, D], in the
/// order of copy_tokens. Collective.
Buffer return_partials(const Exchange& exchange, const Relay& relay, const GatherSumArgs& args,
                       const PeerRows& peers);

}  // namespace crossdock
