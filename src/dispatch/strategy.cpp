#include "crossdock/extend/strategy.hpp"

#include "crossdock/extend/plan_data.hpp"
#include "dispatch/host/wire.hpp"
#include "ops/copy_rows.hpp"

namespace crossdock {

void Strategy::scatter_chunks(const Exchange& exchange, std::span<const RowPart> parts,
                              std::span<const ExpertChunk> chunks,
                              const std::function<void(size_t)>& arrived) {
  scatter(exchange, parts);
  for (size_t i = 0; i < chunks.size(); ++i) arrived(i);
}

void Strategy::scatter_routes(const Exchange& exchange, ConstTensorView routes, TensorView rows) {
  const PlanData& plan = exchange.plan.data();
  const int64_t element_bytes = size_of(routes.dtype);
  const Buffer packed = exchange.group.pool().take_scratch(plan.num_sent() * element_bytes);
  ops::gather_rows({.x = static_cast<const std::byte*>(routes.data),
                    .index = plan.sent_routes.data(),
                    .rows = packed.data(),
                    .num_rows = plan.num_sent(),
                    .row_bytes = element_bytes});
  const Buffer arrived = exchange_rows(exchange, {.send = packed,
                                                  .send_offsets = plan.send_offsets,
                                                  .recv_offsets = plan.recv_offsets,
                                                  .row_bytes = element_bytes});
  std::vector<ops::BlockCopy> blocks;
  for (const RowBlock& block : plan.recv_blocks) {
    blocks.push_back({.from = block.arrival, .to = block.row, .count = block.count});
  }
  ops::copy_blocks({.from = arrived.data(),
                    .to = static_cast<std::byte*>(rows.data),
                    .blocks = blocks,
                    .row_bytes = element_bytes});
}

void Strategy::gather_routes(const Exchange& exchange, ConstTensorView rows, TensorView routes) {
  const PlanData& plan = exchange.plan.data();
  const int64_t element_bytes = size_of(rows.dtype);
  const Buffer packed = exchange.group.pool().take_scratch(plan.num_received() * element_bytes);
  std::vector<ops::BlockCopy> blocks;
  for (const RowBlock& block : plan.recv_blocks) {
    blocks.push_back({.from = block.row, .to = block.arrival, .count = block.count});
  }
  ops::copy_blocks({.from = static_cast<const std::byte*>(rows.data),
                    .to = packed.data(),
                    .blocks = blocks,
                    .row_bytes = element_bytes});
  const Buffer arrived = exchange_rows(exchange, {.send = packed,
                                                  .send_offsets = plan.recv_offsets,
                                                  .recv_offsets = plan.send_offsets,
                                                  .row_bytes = element_bytes});
  ops::scatter_rows({.x = arrived.data(),
                     .index = plan.sent_routes.data(),
                     .rows = static_cast<std::byte*>(routes.data),
                     .num_rows = plan.num_sent(),
                     .row_bytes = element_bytes});
}

OwnedTensor Strategy::allocate_rows(const Exchange& exchange, DType dtype, Shape shape) {
  return exchange.group.pool().take(dtype, shape);
}

const StrategyModel& Strategy::model() const {
  static const StrategyModel kModel;
  return kModel;
}

}  // namespace crossdock
