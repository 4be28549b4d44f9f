#include "dispatch/host/wire.hpp"

#include "crossdock/extend/plan_data.hpp"

namespace crossdock {
namespace {

// Removes the block of `rank` from the offsets; returns its size.
int64_t remove_block(std::vector<int64_t>& offsets, size_t rank) {
  const int64_t size = offsets[rank + 1] - offsets[rank];
  for (size_t r = rank + 1; r < offsets.size(); ++r) offsets[r] -= size;
  return size;
}

}  // namespace

ExchangedRows::ExchangedRows(const PlanData& plan)
    : rank_(static_cast<size_t>(plan.rank)),
      send_offsets_(plan.send_offsets),
      recv_offsets_(plan.recv_offsets) {
  staying_sent_ = remove_block(send_offsets_, rank_);
  const int64_t staying_received = remove_block(recv_offsets_, rank_);
  recv_blocks_.reserve(plan.recv_blocks.size());
  for (RowBlock block : plan.recv_blocks) {
    if (block.source == plan.rank) continue;
    if (block.source > plan.rank) block.arrival -= staying_received;
    recv_blocks_.push_back(block);
  }
}

std::vector<int64_t> byte_offsets(std::span<const int64_t> row_offsets, int64_t row_bytes) {
  std::vector<int64_t> offsets(row_offsets.begin(), row_offsets.end());
  for (int64_t& offset : offsets) offset *= row_bytes;
  return offsets;
}

Buffer exchange_rows(const Exchange& exchange, const RowExchange& rows) {
  Group& group = exchange.group;
  const std::vector<int64_t> send_offsets = byte_offsets(rows.send_offsets, rows.row_bytes);
  const std::vector<int64_t> recv_offsets = byte_offsets(rows.recv_offsets, rows.row_bytes);
  Buffer recv = group.pool().take_scratch(recv_offsets.back());
  group.all_to_all_v(shared_bytes(rows.send), send_offsets, shared_bytes(recv), recv_offsets,
                     group.wait_context(exchange.operation, exchange.sequence));
  return recv;
}

}  // namespace crossdock
