#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "comm/memory/window.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "crossdock/extend/strategy.hpp"
#include "crossdock/plan.hpp"
#include "crossdock/tensor.hpp"

// Rows of a dispatcher's calls in host memory.

namespace crossdock {

/// tokens [T, ...] and the rows [R, ...] they go to, as bits.
RowPart row_part(const ConstTensorView& tokens, const TensorView& rows);

/// The weight of the route in a slot, t * K + k.
double weight_at(const PlanData& plan, size_t slot);

/// Zeroes the rows that belong to no route.
void zero_pad_rows(const PlanData& plan, const TensorView& rows);

void zero(const TensorView& tensor);

/// Phase of the event that records a copy of foreign memory.
inline constexpr const char* kForeignCopy = "copy of foreign rows";

/// Rows of this rank that the ranks of its node can reach. Foreign memory, which is not reachable,
/// is replaced by a lease of the same size; the copy is recorded as an event.
class ExposedRows {
 public:
  /// For peers to store into. Contents of a lease are unspecified.
  static ExposedRows to_fill(const StrategyCall& call, std::byte* rows, int64_t num_bytes);
  /// For peers to load from.
  static ExposedRows to_read(const StrategyCall& call, const std::byte* rows, int64_t num_bytes);

  const comm::WindowHandle& handle() const { return handle_; }
  /// Where the rows of this rank are while peers use them.
  std::byte* data() const { return data_; }
  /// After the peers have stored: copies the plan's rows from a lease, if any, to the rows given.
  void fetch(const StrategyCall& call, int64_t row_bytes) const;

 private:
  ExposedRows(const StrategyCall& call, std::byte* rows, int64_t num_bytes);

  std::byte* wanted_;
  std::byte* data_;
  Buffer lease_;  // empty if the memory itself is in a window
  comm::WindowHandle handle_;
};

/// The rows of all ranks of this node, one entry per ExposedRows.
class PeerRows {
 public:
  /// addresses: [P, entries]
  PeerRows(size_t num_entries, std::vector<std::byte*> addresses)
      : num_entries_(num_entries), addresses_(std::move(addresses)) {}

  /// Null if `rank` is on another node or has no rows.
  std::byte* at(int rank, size_t entry = 0) const {
    return addresses_[static_cast<size_t>(rank) * num_entries_ + entry];
  }

 private:
  size_t num_entries_;
  std::vector<std::byte*> addresses_;
};

/// Tells all ranks where this rank's rows are. Collective over the whole group.
PeerRows exchange_addresses(const StrategyCall& call, std::span<const ExposedRows> shown);

/// Ends an exchange in which ranks used each other's memory: when it returns, the stores of all
/// ranks are done. Collective.
void barrier(const StrategyCall& call);

/// Whether `rank` is on this rank's node.
bool is_reachable(const StrategyCall& call, int rank);

}  // namespace crossdock
