#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "crossdock/extend/plan_data.hpp"
#include "crossdock/extend/strategy.hpp"
#include "dispatch/host/peer_rows.hpp"
#include "plan/gateway.hpp"

namespace crossdock {

/// Where a relayed copy of a token ends.
struct RelayTarget {
  int64_t rank = 0;   // on the gateway's node
  int64_t row = 0;    // final row there
  double weight = 0;  // of the route
};

/// Some tokens of every source, and the most rows that any rank sends or receives for them.
struct RelayStretch {
  int64_t first_token = 0;
  int64_t last_token = 0;  // one past; may be beyond this rank's T
  int64_t num_copies = 0;
  int64_t num_routes = 0;
};

/// How tokens reach ranks on other nodes: one copy travels to a gateway, which fans it out inside
/// its node; on the way back the gateway reads the rows where they lie. Made once per plan.
struct Relay {
  // As a source: the copies that leave, by (gateway, token), and the routes each one serves.
  std::vector<int64_t> copy_offsets;  // [P + 1] by gateway
  std::vector<int64_t> copy_tokens;   // [copies]
  std::vector<int64_t> slot_offsets;  // [copies + 1] into slots
  std::vector<int64_t> slots;         // t * K + k, in slot order
  // As a gateway: the copies that come, by (source, token), and their targets in slot order.
  std::vector<int64_t> arrival_offsets;  // [P + 1] by source
  std::vector<int64_t> arrival_tokens;   // [arrivals] as the source counts them
  std::vector<int64_t> target_offsets;   // [arrivals + 1] into targets
  std::vector<RelayTarget> targets;
  // All tokens, in the same pieces on all ranks.
  std::vector<RelayStretch> stretches;
};

/// Tells the gateways what they will get. Collective.
Relay make_relay(const Exchange& exchange, const Gateway& gateway);

/// The way out, chunk by chunk: a copy travels with the first chunk that it serves, and all its
/// targets get their rows then, so that it crosses once. Both ends see the same targets, so nothing
/// is exchanged.
std::vector<Relay> split_relay(const Relay& relay, const PlanData& plan,
                               std::span<const ExpertChunk> chunks);

/// Divides the tokens so that no rank sends or receives more rows for a piece than may be on their
/// way at once, whatever the dtype and however uneven the routes are; a single token is not
/// divided. Collective where there are several nodes.
std::vector<RelayStretch> make_stretches(const Exchange& exchange, const Relay& relay);

/// Relayed rows travel in rounds, each for a range of the tokens of every source, so that the rows
/// on their way take at most staging_bytes, once sent and once received, whatever T is and wherever
/// they go. All ranks make the same rounds.
struct RelayRound {
  int64_t first_token = 0;
  int64_t last_token = 0;                            // one past; may be beyond this rank's T
  std::vector<int64_t> first_copy, last_copy;        // [P] by gateway
  std::vector<int64_t> first_arrival, last_arrival;  // [P] by source
};
/// What travels: one row per copy, or one per route; or sums, one per copy, beside which a source
/// makes up to one per route of its own node.
enum class RelayedRows : uint8_t { kCopies, kRoutes, kSums };
std::vector<RelayRound> relay_rounds(const Exchange& exchange, const Relay& relay,
                                     RelayedRows travelling, int64_t row_bytes);

/// The copies of a round travel and are stored in the final rows on the gateways' nodes.
/// Collective. REQUIRES: entry `entry` of `peers` shows the rows of all ranks.
void relay_round_out(const Exchange& exchange, const Relay& relay, const RelayRound& round,
                     const RowPart& part, const PeerRows& peers, size_t entry);

/// What a round brought back to a source: one row per element of `copies_or_slots`.
struct ReturnedRows {
  Buffer rows;
  std::vector<int64_t> numbers;  // of the slots (exact) or copies (partial sums), in row order
};

/// The way back of a round, every row for itself. Collective.
ReturnedRows return_round(const Exchange& exchange, const Relay& relay, const RelayRound& round,
                          const GatherSumArgs& args, const PeerRows& peers);

/// The way back with one row per copy: gateways sum the targets' rows in slot order (fp32, or fp64
/// for fp64 rows). Collective.
ReturnedRows return_round_sums(const Exchange& exchange, const Relay& relay,
                               const RelayRound& round, const GatherSumArgs& args,
                               const PeerRows& peers);

}  // namespace crossdock
