#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/cuda/device_pool.hpp"
#include "crossdock/plan.hpp"
#include "dispatch/cuda/device_plan.hpp"

namespace crossdock::cuda {

/// Rows between this rank and each other, in rows: which part of this rank's send buffer goes to
/// rank p, which part of its receive buffer comes from there, and which part of rank p's send
/// buffer that is.
struct RowTraffic {
  struct Part {
    int64_t send_begin = 0;
    int64_t send_count = 0;
    int64_t recv_begin = 0;
    int64_t recv_count = 0;
    int64_t peer_begin = 0;
  };
  std::vector<Part> parts;   // [P]
  int64_t num_sent = 0;      // rows of the send buffer
  int64_t num_received = 0;  // rows of the receive buffer
};

/// From where the parts of this rank's send and receive buffers begin ([P + 1] each), and where its
/// part of every other rank's send buffer does ([P]).
RowTraffic make_traffic(std::span<const int64_t> send_offsets,
                        std::span<const int64_t> recv_offsets,
                        std::span<const int64_t> peer_begins);

/// Rows from rank `source` to rank `destination`.
int64_t rows_between(const PlanData& data, int source, int destination);

/// What alltoall and allgather need of a plan that the host has made: index arrays on the device,
/// sizes on the host.
class ExchangePlan {
 public:
  /// arrival_tokens: token of each arrival as its source counts, for allgather; else empty. Waits
  /// for the device.
  ExchangePlan(DevicePool& pool, const PlanData& data, std::span<const int64_t> arrival_tokens,
               cudaStream_t stream);

  const RowTraffic& out() const { return out_; }        // tokens to experts
  const RowTraffic& home() const { return home_; }      // rows to their sources
  const RowTraffic& tokens() const { return tokens_; }  // all tokens to all ranks

  // Device arrays.
  const int64_t* sent_routes() const { return sent_routes_; }        // [S] t * K + k
  const int64_t* sent_tokens() const { return sent_tokens_; }        // [S] t
  const int64_t* arrival_rows() const { return arrival_rows_; }      // [received] row
  const int64_t* arrival_tokens() const { return arrival_tokens_; }  // [received] among all tokens
  const RouteTarget* sum_targets() const { return sum_targets_; }    // [T, K] place among the sent
  const RouteTarget* row_targets() const { return row_targets_; }    // [R] each row itself

 private:
  RowTraffic out_;
  RowTraffic home_;
  RowTraffic tokens_;
  Buffer memory_;
  const int64_t* sent_routes_ = nullptr;
  const int64_t* sent_tokens_ = nullptr;
  const int64_t* arrival_rows_ = nullptr;
  const int64_t* arrival_tokens_ = nullptr;
  const RouteTarget* sum_targets_ = nullptr;
  const RouteTarget* row_targets_ = nullptr;
};

}  // namespace crossdock::cuda
