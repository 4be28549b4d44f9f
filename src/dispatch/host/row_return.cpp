#include "dispatch/host/row_return.hpp"

#include <vector>

#include "crossdock/extend/plan_data.hpp"
#include "dispatch/host/wire.hpp"
#include "ops/copy_rows.hpp"
#include "ops/sum_rows.hpp"

namespace crossdock {
namespace {

// Packs the rows of other ranks, in the order in which they arrived.
Buffer pack_by_source(const Exchange& exchange, const ExchangedRows& travelling,
                      const ConstTensorView& rows) {
  std::vector<ops::BlockCopy> blocks;
  for (const RowBlock& block : travelling.recv_blocks()) {
    blocks.push_back({.from = block.row, .to = block.arrival, .count = block.count});
  }
  Buffer packed = exchange.group.pool().take_scratch(travelling.num_received() * rows.row_bytes());
  ops::copy_blocks({.from = static_cast<const std::byte*>(rows.data),
                    .to = packed.data(),
                    .blocks = blocks,
                    .row_bytes = rows.row_bytes()});
  return packed;
}

}  // namespace

void return_and_sum(const Exchange& exchange, const GatherSumArgs& args) {
  const PlanData& plan = exchange.plan.data();
  const int64_t row_bytes = args.rows.row_bytes();
  const ExchangedRows travelling(plan);

  Buffer packed = pack_by_source(exchange, travelling, args.rows);
  const Buffer arrived = exchange_rows(exchange, {.send = packed,
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
                *exchange.group.threads());
}

}  // namespace crossdock
