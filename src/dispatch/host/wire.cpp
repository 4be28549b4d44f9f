#include "dispatch/host/wire.hpp"

#include <vector>

#include "crossdock/extend/plan_data.hpp"
#include "ops/copy_rows.hpp"
#include "ops/sum_rows.hpp"

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

Buffer exchange_rows(const StrategyCall& call, const RowExchange& rows) {
  Group& group = call.group;
  const std::vector<int64_t> send_offsets = byte_offsets(rows.send_offsets, rows.row_bytes);
  const std::vector<int64_t> recv_offsets = byte_offsets(rows.recv_offsets, rows.row_bytes);
  Buffer recv = group.pool().take_scratch(recv_offsets.back());
  group.all_to_all_v(shared_bytes(rows.send), send_offsets, shared_bytes(recv), recv_offsets,
                     group.wait_context(call.operation, call.sequence));
  return recv;
}

namespace {

// Packs the rows of other ranks, in the order in which they arrived.
Buffer pack_by_source(const StrategyCall& call, const ExchangedRows& travelling,
                      const ConstTensorView& rows) {
  std::vector<ops::BlockCopy> blocks;
  for (const RowBlock& block : travelling.recv_blocks()) {
    blocks.push_back({.from = block.row, .to = block.arrival, .count = block.count});
  }
  Buffer packed = call.group.pool().take_scratch(travelling.num_received() * rows.row_bytes());
  ops::copy_blocks({.from = static_cast<const std::byte*>(rows.data),
                    .to = packed.data(),
                    .blocks = blocks,
                    .row_bytes = rows.row_bytes()});
  return packed;
}

}  // namespace

void return_and_sum(const StrategyCall& call, const GatherSumArgs& args) {
  const PlanData& plan = call.plan.data();
  const int64_t row_bytes = args.rows.row_bytes();
  const ExchangedRows travelling(plan);

  Buffer packed = pack_by_source(call, travelling, args.rows);
  const Buffer arrived = exchange_rows(call, {.send = packed,
                                              .send_offsets = travelling.recv_offsets(),
                                              .recv_offsets = travelling.send_offsets(),
                                              .row_bytes = row_bytes});
  packed = {};

  const auto* here = static_cast<const std::byte*>(args.rows.data);
  std::vector<const std::byte*> rows(plan.expert_ids.size(), nullptr);
  for (size_t slot = 0; slot < rows.size(); ++slot) {
    if (plan.expert_ids[slot] < 0) continue;
    const bool stayed = plan.owner[static_cast<size_t>(plan.expert_ids[slot])] == plan.rank;
    rows[slot] =
        stayed ? here + plan.final_rows[slot] * row_bytes
               : arrived.data() + travelling.send_index(plan.send_positions[slot]) * row_bytes;
  }
  ops::sum_rows({.rows = rows.data(),
                 .K = plan.K,
                 .weights = args.weights.data,
                 .out = static_cast<std::byte*>(args.out.data),
                 .N = plan.T,
                 .D = args.out.shape[1],
                 .row_dtype = args.rows.dtype,
                 .out_dtype = args.out.dtype},
                *call.group.threads());
}

}  // namespace crossdock
