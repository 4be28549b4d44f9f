#include "dispatch/wire.hpp"

namespace crossdock {
namespace {

// Takes the blocks of near ranks out of the offsets; returns how far each block has moved.
std::vector<int64_t> remove_near(std::vector<int64_t>& offsets, const IsNear& is_near) {
  std::vector<int64_t> shifts(offsets.size() - 1);
  int64_t removed = 0;
  for (size_t rank = 0; rank < shifts.size(); ++rank) {
    shifts[rank] = removed;
    const int64_t size = offsets[rank + 1] - offsets[rank];
    offsets[rank] -= removed;
    if (is_near(static_cast<int>(rank))) removed += size;
  }
  offsets.back() -= removed;
  return shifts;
}

}  // namespace

TravellingRows::TravellingRows(const PlanData& plan, const IsNear& is_near)
    : send_offsets_(plan.send_offsets), recv_offsets_(plan.recv_offsets) {
  send_shifts_ = remove_near(send_offsets_, is_near);
  const std::vector<int64_t> recv_shifts = remove_near(recv_offsets_, is_near);
  for (RowBlock block : plan.recv_blocks) {
    if (is_near(block.source)) continue;
    block.arrival -= recv_shifts[static_cast<size_t>(block.source)];
    recv_blocks_.push_back(block);
  }
}

SharedBytes shared_bytes(const Buffer& buffer) {
  return {.data = buffer.data(), .num_bytes = buffer.num_bytes(), .owner = buffer.owner()};
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
  Buffer recv = group.pool().take(recv_offsets.back());
  group.all_to_all_v(shared_bytes(rows.send), send_offsets, shared_bytes(recv), recv_offsets,
                     group.wait_context(exchange.operation, exchange.sequence));
  return recv;
}

}  // namespace crossdock
