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

}  // namespace crossdock
