#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "crossdock/extend/plan_data.hpp"
#include "crossdock/extend/strategy.hpp"
#include "dispatch/host/peer_rows.hpp"
#include "plan/placement.hpp"

namespace crossdock {

/// Final destination of a relayed copy of a token.
struct RelayTarget {
  int64_t rank = 0;   // on the gateway's node
  int64_t row = 0;    // final row there
  double weight = 0;  // of the route
};

/// A range of every source's tokens, and the maximum number of rows that any rank sends or receives
/// for it.
struct RelayRange {
  int64_t first_token = 0;
  int64_t last_token = 0;  // one past; may be beyond this rank's T
  int64_t num_copies = 0;
  int64_t num_routes = 0;
};

/// How tokens reach ranks on other nodes: one copy is sent to a gateway, which fans it out within
/// its node; to return rows, the gateway reads them in place. Made once per plan.
struct Relay {
  // As a source: the copies that leave, by (gateway, token), and the routes each one serves.
  std::vector<int64_t> copy_offsets;  // [P + 1] by gateway
  std::vector<int64_t> copy_tokens;   // [copies]
  std::vector<int64_t> slot_offsets;  // [copies + 1] into slots
  std::vector<int64_t> slots;         // t * K + k, in slot order
  // As a gateway: the copies that arrive, by (source, token), and their targets in slot order.
  std::vector<int64_t> arrival_offsets;  // [P + 1] by source
  std::vector<int64_t> arrival_tokens;   // [arrivals] numbered as on the source
  std::vector<int64_t> target_offsets;   // [arrivals + 1] into targets
  std::vector<RelayTarget> targets;
  // All tokens, divided identically on every rank.
  std::vector<RelayRange> ranges;
};

/// Announces to the gateways which copies they will receive. Collective.
Relay make_relay(const StrategyCall& call, const Gateway& gateway);

/// Divides a scatter into chunks: a copy is sent once, with the first chunk that it serves, and all
/// its targets get their rows then. Both ends know the same targets, so nothing is exchanged.
std::vector<Relay> split_relay(const Relay& relay, const PlanData& plan,
                               std::span<const ExpertChunk> chunks);

/// Divides the tokens so that no rank sends or receives more rows for a range than may be in
/// flight, for any dtype and however uneven the routes are; a single token is not divided.
/// Collective if there are several nodes.
std::vector<RelayRange> divide_tokens(const StrategyCall& call, const Relay& relay);

/// Relayed rows are exchanged in rounds, each for a range of every source's tokens. Rows in flight
/// take at most staging_bytes for sending and as much for receiving, for any T and any routing. All
/// ranks make the same rounds.
struct RelayRound {
  int64_t first_token = 0;
  int64_t last_token = 0;                            // one past; may be beyond this rank's T
  std::vector<int64_t> first_copy, last_copy;        // [P] by gateway
  std::vector<int64_t> first_arrival, last_arrival;  // [P] by source
};
/// The rows exchanged: one per copy, one per route, or one sum per copy. With sums, a source also
/// makes up to one row per route within its own node.
enum class RelayedRows : uint8_t { kCopies, kRoutes, kSums };
std::vector<RelayRound> relay_rounds(const StrategyCall& call, const Relay& relay,
                                     RelayedRows travelling, int64_t row_bytes);

/// Sends the copies of a round and stores them in the final rows on the gateways' nodes.
/// Collective. REQUIRES: entry `entry` of `peers` shows the rows of all ranks.
void relay_round_out(const StrategyCall& call, const Relay& relay, const RelayRound& round,
                     const RowPart& part, const PeerRows& peers, size_t entry);

/// Rows that a round returned to a source, one per element of `numbers`.
struct ReturnedRows {
  Buffer rows;
  std::vector<int64_t> numbers;  // of the slots (exact) or copies (partial sums), in row order
};

/// Returns one row per route of a round. Collective.
ReturnedRows return_round(const StrategyCall& call, const Relay& relay, const RelayRound& round,
                          const GatherSumArgs& args, const PeerRows& peers);

/// Returns one row per copy of a round: gateways sum the targets' rows in slot order and round each
/// sum to partial_dtype. Collective.
ReturnedRows return_round_sums(const StrategyCall& call, const Relay& relay,
                               const RelayRound& round, const GatherSumArgs& args,
                               const PeerRows& peers);

/// The sum group of a rank (a rank or a node): a token's rows in one group are summed first.
using SumGroup = std::function<int(int rank)>;

/// How a source adds up a token with grouped sums. It loads the rows on its own node, group by
/// group; rows on other nodes return as one partial row per relayed copy.
struct SourcePartials {
  std::vector<int64_t> near_slots;  // t * K + k of the routes to this node, by (token, group, slot)
  std::vector<int64_t> near_offsets;        // [near sums + 1] into near_slots
  std::vector<int64_t> near_token_offsets;  // [T + 1] into the near sums
  // By (token, group): the number of a near sum, or ~ the number of a copy.
  std::vector<int64_t> partials;
  std::vector<int64_t> partial_token_offsets;  // [T + 1] into partials

  int64_t num_near() const { return std::ssize(near_offsets) - 1; }
};

SourcePartials make_source_partials(const StrategyCall& call, const Relay& relay,
                                    const SumGroup& group_of);

/// Rows [first_token, last_token) of args.out: near sums in slot order, then the sum of a token's
/// partials, groups ascending. `returned` holds the partial rows of those tokens' copies.
struct GroupedSumArgs {
  const SourcePartials& partials;
  const ReturnedRows& returned;
  int64_t first_token;
  int64_t last_token;
  GatherSumArgs sum;
};
void sum_grouped(const StrategyCall& call, const PeerRows& peers, const GroupedSumArgs& args);

}  // namespace crossdock
