#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "comm/memory/window.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "crossdock/extend/strategy.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {

/// The rows that an all-to-all exchanges: all rows of the plan except those that stay on this rank,
/// which need no staging.
class ExchangedRows {
 public:
  explicit ExchangedRows(const PlanData& plan);

  std::span<const int64_t> send_offsets() const { return send_offsets_; }  // [P + 1] in rows
  std::span<const int64_t> recv_offsets() const { return recv_offsets_; }  // [P + 1] in rows
  int64_t num_sent() const { return send_offsets_.back(); }
  int64_t num_received() const { return recv_offsets_.back(); }

  /// Index of a route among those that leave this rank. REQUIRES: its owner is another rank.
  int64_t send_index(int64_t send_position) const {
    return send_position < send_offsets_[rank_] ? send_position : send_position - staying_sent_;
  }
  /// The plan's blocks from other ranks; `arrival` counts only the rows of these blocks.
  std::span<const RowBlock> recv_blocks() const { return recv_blocks_; }

 private:
  size_t rank_;
  int64_t staying_sent_;
  std::vector<int64_t> send_offsets_;
  std::vector<int64_t> recv_offsets_;
  std::vector<RowBlock> recv_blocks_;
};

/// An all-to-all of rows. Rows [send_offsets[r], send_offsets[r + 1]) of `send` go to rank r;
/// returns the received rows, ordered by source.
struct RowExchange {
  const Buffer& send;
  std::span<const int64_t> send_offsets;  // [P + 1] in rows
  std::span<const int64_t> recv_offsets;  // [P + 1] in rows
  int64_t row_bytes;
};
Buffer exchange_rows(const StrategyCall& call, const RowExchange& rows);

/// Converts offsets in rows to offsets in bytes.
std::vector<int64_t> byte_offsets(std::span<const int64_t> row_offsets, int64_t row_bytes);

/// Exact gather_sum: an all-to-all returns every row to its source, which sums the rows in slot
/// order directly from the receive buffer.
void return_and_sum(const StrategyCall& call, const GatherSumArgs& args);

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
