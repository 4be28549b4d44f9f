#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "crossdock/extend/strategy.hpp"
#include "dispatch/host/peer_rows.hpp"
#include "dispatch/strategies/direct/relay.hpp"

namespace crossdock {

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
