#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "crossdock/extend/plan_data.hpp"
#include "dispatch/host/wire.hpp"

namespace crossdock {

namespace cuda {
struct Packing;
/// What allgather exchanges on GPUs.
Packing allgather_packing();
}  // namespace cuda

/// First token of every rank among all tokens, [P + 1].
std::vector<int64_t> token_offsets(const PlanData& plan);

// The state of a plan that this strategy made.

/// [received] the token of every arrival, numbered as on its source.
std::span<const int64_t> arrival_tokens_of(const Plan& plan);
/// REQUIRES: the plan has partial sums.
const RankSums& rank_sums_of(const Plan& plan);

}  // namespace crossdock
