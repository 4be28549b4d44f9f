#pragma once

#include <cstdint>
#include <vector>

#include "crossdock/extend/plan_data.hpp"
#include "crossdock/extend/strategy.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {

/// Which rows are summed where if sums are made per rank: the rows of one token at one rank become
/// one partial row (summed in slot order, rounded to partial_dtype), and the source adds a token's
/// partial rows in rank order.
struct RankSums {
  // At the experts: the sums this rank makes, by (source, token).
  std::vector<int64_t> rows;            // [received] the rows to sum, by (source, token, slot)
  Buffer weights;                       // [received] their weights, in the plan's weight dtype
  std::vector<int64_t> sum_offsets;     // [sums + 1] into rows
  std::vector<int64_t> tokens;          // [sums] the token, numbered as on its source
  std::vector<int64_t> source_offsets;  // [P + 1] into sums

  // At the source: the partial rows that arrive, by (rank, token).
  std::vector<int64_t> rank_offsets;   // [P + 1]
  std::vector<int64_t> partials;       // partial rows of each token, ranks ascending
  std::vector<int64_t> token_offsets;  // [T + 1] into partials
};

/// Tells every rank which of its rows belong to the same token. Collective, one all-to-all.
RankSums exchange_rank_sums(const StrategyCall& call);

/// Dtype and size of the partial rows of this call.
DType partial_dtype(const StrategyCall& call, const GatherSumArgs& args);
int64_t partial_row_bytes(const StrategyCall& call, const GatherSumArgs& args);

/// The sums this rank makes, [sums, D].
Buffer sum_at_experts(const StrategyCall& call, const RankSums& sums, const GatherSumArgs& args);

/// Offsets of one sum for every token of every source, empty if this rank has no row of the token:
/// [sum of tokens_per_rank + 1] into RankSums::rows.
std::vector<int64_t> dense_sum_offsets(const PlanData& plan, const RankSums& sums);

/// The sums of dense_sum_offsets; empty sums are zero: [sum of tokens_per_rank, D].
Buffer sum_at_experts_dense(const StrategyCall& call, const RankSums& sums,
                            const GatherSumArgs& args);

/// Computes args.out from the arrived partial rows, made by sum_at_experts.
void sum_partials(const StrategyCall& call, const RankSums& sums, const Buffer& arrived,
                  const GatherSumArgs& args);

}  // namespace crossdock
