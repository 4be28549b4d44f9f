#include "dispatch/host/peer_rows.hpp"

#include <cstring>
#include <utility>

#include "comm/agreement/items.hpp"
#include "core/stream_copy.hpp"
#include "core/tensor_memory.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "ops/copy_rows.hpp"
#include "plan/plan_builder.hpp"

namespace crossdock {

RowPart row_part(const ConstTensorView& tokens, const TensorView& rows) {
  return {.tokens = static_cast<const std::byte*>(tokens.data),
          .rows = static_cast<std::byte*>(rows.data),
          .row_bytes = rows.row_bytes()};
}

double weight_at(const PlanData& plan, size_t slot) {
  return plan.weight_dtype == DType::kF64 ? pointer<double>(plan.weights)[slot]
                                          : static_cast<double>(pointer<float>(plan.weights)[slot]);
}

void zero_pad_rows(const PlanData& plan, const TensorView& rows) {
  for (const RowRange& pad : pad_rows(plan)) {
    std::memset(static_cast<std::byte*>(rows.data) + pad.first * rows.row_bytes(), 0,
                static_cast<size_t>(pad.count * rows.row_bytes()));
  }
}

void zero(const TensorView& tensor) {
  if (tensor.num_bytes() > 0) {
    std::memset(tensor.data, 0, static_cast<size_t>(tensor.num_bytes()));
  }
}

ExposedRows::ExposedRows(const StrategyCall& call, std::byte* rows, int64_t num_bytes)
    : wanted_(rows), data_(rows) {
  comm::WindowPool& windows = comm::windows_of(call.group);
  const std::optional<comm::WindowHandle> found = windows.find(rows, num_bytes);
  if (found) {
    handle_ = *found;
    return;
  }
  lease_ = windows.take(num_bytes);
  data_ = lease_.data();
  handle_ = *windows.find(data_, num_bytes);
}

ExposedRows ExposedRows::to_fill(const StrategyCall& call, std::byte* rows, int64_t num_bytes) {
  return {call, rows, num_bytes};
}

ExposedRows ExposedRows::to_read(const StrategyCall& call, const std::byte* rows,
                                 int64_t num_bytes) {
  // Peers only read, so the memory does not change.
  ExposedRows shown(call, const_cast<std::byte*>(rows), num_bytes);
  if (shown.data_ == rows) return shown;
  const EventRecorder::Scope scope(call.group.recorder(), call.operation, call.sequence, num_bytes,
                                   kForeignCopy);
  copy_bytes(shown.data_, rows, num_bytes, stores_for(num_bytes));
  finish_stores();
  return shown;
}

void ExposedRows::fetch(const StrategyCall& call, int64_t row_bytes) const {
  if (data_ == wanted_) return;
  const PlanData& plan = call.plan.data();
  const EventRecorder::Scope scope(call.group.recorder(), call.operation, call.sequence,
                                   plan.num_received() * row_bytes, kForeignCopy);
  std::vector<ops::BlockCopy> blocks;
  for (const RowBlock& block : plan.recv_blocks) {
    blocks.push_back({.from = block.row, .to = block.row, .count = block.count});
  }
  ops::copy_blocks({.from = data_, .to = wanted_, .blocks = blocks, .row_bytes = row_bytes});
}

PeerRows exchange_addresses(const StrategyCall& call, std::span<const ExposedRows> shown) {
  std::vector<comm::WindowHandle> handles;
  for (const ExposedRows& rows : shown) handles.push_back(rows.handle());
  const Agreement agreement = call.group.agree({.operation = call.operation,
                                                .subject = call.plan.id(),
                                                .body = std::as_bytes(std::span(handles)),
                                                .under_way = true});
  std::vector<std::byte*> addresses;
  for (int rank = 0; rank < call.group.size(); ++rank) {
    std::span<const std::byte> body = agreement.body(rank);
    for (const auto& handle : split_items<comm::WindowHandle>(body, std::ssize(handles))) {
      addresses.push_back(
          is_reachable(call, rank) ? comm::windows_of(call.group).reach(rank, handle) : nullptr);
    }
  }
  return {shown.size(), std::move(addresses)};
}

void barrier(const StrategyCall& call) {
  finish_stores();
  call.group.agree({.operation = call.operation, .subject = call.plan.id(), .under_way = true});
}

bool is_reachable(const StrategyCall& call, int rank) {
  const std::vector<int>& node = call.group.topology().node_of_rank;
  return node[static_cast<size_t>(rank)] == node[static_cast<size_t>(call.group.rank())];
}

}  // namespace crossdock
