#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "crossdock/extend/plan_data.hpp"
#include "crossdock/extend/strategy.hpp"
#include "dispatch/host/partial_sums.hpp"

namespace crossdock {

/// Every rank gets all tokens and keeps those for its experts. Rows return to their source and are
/// summed there; with partial_sums every rank sums its rows of every token, and the sums are
/// reduce-scattered. Sends P - 1 rows per token; at most K return, or P - 1 with partial_sums.
std::unique_ptr<Strategy> make_allgather();

/// First token of every rank among all tokens, [P + 1].
std::vector<int64_t> token_offsets(const PlanData& plan);

// The state of a plan that this strategy made.

/// [received] the token of every arrival, numbered as on its source.
std::span<const int64_t> arrival_tokens_of(const Plan& plan);
/// REQUIRES: the plan has partial sums.
const RankSums& rank_sums_of(const Plan& plan);

}  // namespace crossdock
