#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "crossdock/plan.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {

/// Rows from one source for one local expert: arrivals [arrival, arrival + count) become rows [row,
/// row + count). Arrivals are numbered in the order (source, expert, token, slot).
struct RowBlock {
  int source = 0;
  int64_t arrival = 0;
  int64_t row = 0;
  int64_t count = 0;
};

/// A plan as strategies see it: everything that follows from the exchanged counts, in host memory.
/// Read-only. A "route" is one used slot of one token; "kept" means not masked, not -1 and not
/// dropped. Rows at an expert are ordered by source rank, then token, then slot.
struct PlanData {
  int64_t T = 0;    // tokens on this rank
  int64_t K = 0;    // slots per token, identical on every rank; see DenseRouting
  int64_t E = 0;    // experts in all
  int P = 0;        // ranks
  int rank = 0;     // this one
  uint64_t id = 0;  // number of the agreement that made it

  // Identical on every rank.
  std::shared_ptr<const DispatchConfig> config;  // of the dispatcher that made the plan
  std::vector<int32_t> owner;                    // [E] expert -> rank
  std::vector<int32_t> experts_by_owner;         // [E] experts by (owner, expert)
  std::vector<int64_t> owner_offsets;            // [P + 1] into experts_by_owner
  std::vector<int64_t> tokens_per_rank;          // [P] every rank's T
  std::vector<int64_t> counts;                   // [P, E] kept routes of source rank s to expert e
  std::vector<int64_t> segment_starts;           // [E] first row of expert e at its owner
  std::vector<int64_t> source_starts;  // [P, E] first row of source s within expert e's segment
  std::vector<int64_t> rows_per_rank;  // [P] rows on each rank, including pad rows

  // Routes of this rank as a sender.
  std::vector<int32_t> expert_ids;      // [T, K] kept expert or -1
  std::vector<int64_t> final_rows;      // [T, K] row at the owner, or -1
  std::vector<int64_t> send_positions;  // [T, K] index among the S kept routes ordered by (owner,
                                        // expert, token, slot), or -1
  std::vector<int64_t> sent_routes;     // [S] the inverse: t * K + k of each, in that order
  std::vector<int64_t> send_offsets;    // [P + 1] in rows, by destination
  std::vector<int64_t> dropped;         // [E] routes of this rank dropped by capacity
  Buffer weights;                       // [T, K]; 0 for routes that are not kept
  DType weight_dtype = DType::kF32;     // fp32 or fp64

  // Rows of this rank as a receiver.
  std::vector<int64_t> recv_offsets;  // [P + 1] in rows, by source
  std::vector<RowBlock> recv_blocks;  // by (source, expert), without empty ones
  std::vector<int64_t> local_starts;  // [E_local + 1]: Segments::starts
  std::vector<int64_t> local_counts;  // [E_local]: Segments::counts; with pad_to_capacity pad rows
                                      // count too, as they lie between the rows of different
                                      // sources

  int64_t num_local_experts() const {
    const auto r = static_cast<size_t>(rank);
    return owner_offsets[r + 1] - owner_offsets[r];
  }
  int64_t num_rows() const { return rows_per_rank[static_cast<size_t>(rank)]; }  // R
  int64_t num_sent() const { return static_cast<int64_t>(sent_routes.size()); }  // S
  int64_t num_received() const { return recv_offsets.back(); }                   // without pad rows
};

/// The part of a plan that is in device memory. If the plan was made on the device, PlanData holds
/// only what the host knows without waiting: sizes, configuration and placement.
class CROSSDOCK_API DevicePlanData {
 public:
  virtual ~DevicePlanData() = default;

  virtual Device device() const = 0;
  virtual int64_t num_rows() const = 0;                  // may wait for the device
  virtual int64_t capacity_rows() const = 0;             // never waits
  virtual Segments segments() const = 0;                 // device memory
  virtual ConstTensorView weights() const = 0;           // device memory
  virtual std::span<const int64_t> dropped() const = 0;  // may wait for the device
};

}  // namespace crossdock
