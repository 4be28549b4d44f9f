#include "dispatch/row_return.hpp"

#include <vector>

#include "dispatch/wire.hpp"
#include "ops/copy_rows.hpp"
#include "ops/sum_rows.hpp"

namespace crossdock {
namespace {

// Rows of other ranks, in the order in which they came.
Buffer pack_by_source(const Exchange& exchange, const TravellingRows& travelling,
                      const ConstTensorView& rows) {
  std::vector<ops::BlockCopy> blocks;
  for (const RowBlock& block : travelling.recv_blocks()) {
    blocks.push_back({.from = block.row, .to = block.arrival, .count = block.count});
  }
  Buffer packed = exchange.group.pool().take(travelling.num_received() * rows.row_bytes());
  ops::copy_blocks({.from = static_cast<const std::byte*>(rows.data),
                    .to = packed.data(),
                    .blocks = blocks,
                    .row_bytes = rows.row_bytes()});
  return packed;
}

}  // namespace

void return_and_sum(const Exchange& exchange, const ReturnArgs& args) {
  const PlanData& plan = exchange.plan.data();
  const GatherSumArgs& sum = args.sum;
  const int64_t row_bytes = sum.rows.row_bytes();
  const TravellingRows travelling(plan, args.is_near);

  Buffer arrived;
  if (!args.all_near) {
    const Buffer packed = pack_by_source(exchange, travelling, sum.rows);
    arrived = exchange_rows(exchange, {.send = packed,
                                       .send_offsets = travelling.recv_offsets(),
                                       .recv_offsets = travelling.send_offsets(),
                                       .row_bytes = row_bytes});
  }

  std::vector<const std::byte*> near(static_cast<size_t>(plan.P), nullptr);
  std::vector<bool> is_near(near.size());
  for (int rank = 0; rank < plan.P; ++rank) {
    is_near[static_cast<size_t>(rank)] = args.is_near(rank);
    if (args.is_near(rank)) near[static_cast<size_t>(rank)] = args.near_rows(rank);
  }
  std::vector<const std::byte*> rows(plan.expert_ids.size(), nullptr);
  for (size_t slot = 0; slot < rows.size(); ++slot) {
    if (plan.expert_ids[slot] < 0) continue;
    const int owner = plan.owner[static_cast<size_t>(plan.expert_ids[slot])];
    rows[slot] =
        is_near[static_cast<size_t>(owner)]
            ? near[static_cast<size_t>(owner)] + plan.final_rows[slot] * row_bytes
            : arrived.data() + travelling.send_index(owner, plan.send_positions[slot]) * row_bytes;
  }
  ops::sum_rows({.rows = rows.data(),
                 .K = plan.K,
                 .weights = sum.weights.data,
                 .out = static_cast<std::byte*>(sum.out.data),
                 .N = plan.T,
                 .D = sum.out.shape[1],
                 .row_dtype = sum.rows.dtype,
                 .out_dtype = sum.out.dtype});
}

void return_and_sum(const Exchange& exchange, const GatherSumArgs& args) {
  const int own_rank = exchange.plan.data().rank;
  return_and_sum(exchange,
                 {.sum = args,
                  .is_near = [own_rank](int rank) { return rank == own_rank; },
                  .near_rows = [&](int) { return static_cast<const std::byte*>(args.rows.data); }});
}

}  // namespace crossdock
