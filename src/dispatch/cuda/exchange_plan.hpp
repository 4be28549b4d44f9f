#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "comm/cuda/stream_watch.hpp"
#include "core/cuda/device_pool.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "crossdock/plan.hpp"
#include "plan/cuda/device_plan.hpp"

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

/// What exchanges of packed rows need of a plan that the host has made: sizes on the host, index
/// arrays on the GPU.
struct ExchangePlan {
  RowTraffic out;     // tokens to experts
  RowTraffic home;    // rows to their sources
  RowTraffic tokens;  // all tokens to all ranks

  Buffer memory;                             // of the arrays
  const int64_t* sent_routes = nullptr;      // [S] t * K + k
  const int64_t* sent_tokens = nullptr;      // [S] t
  const int64_t* arrival_rows = nullptr;     // [received] row
  const int64_t* arrival_tokens = nullptr;   // [received] among all tokens
  const RouteTarget* sum_targets = nullptr;  // [T, K] place among the sent
  const RouteTarget* row_targets = nullptr;  // [R] each row itself
};

/// What a plan needs between nodes where tokens are relayed: one copy of a token goes to each of
/// its gateways, which store it into the final rows on their node; rows of other nodes come home
/// one by one. Sizes are on the host, index arrays on the GPU.
struct RelayPlan {
  RowTraffic copies;    // tokens to gateways
  RowTraffic far_home;  // rows to sources on other nodes

  Buffer memory;                         // of the arrays
  const int64_t* copy_tokens = nullptr;  // [copies sent] t
  // The `rank` of these targets is a slot of the channel.
  const RouteTarget* near_targets = nullptr;  // [T, K] on this node
  const RouteTarget* copy_targets = nullptr;  // [copies received, K]
  const int64_t* far_rows = nullptr;          // [rows sent home] row here
  const RouteTarget* sum_targets = nullptr;   // [T, K]; slot behind the last: came home
};

/// arrival_tokens: token of each arrival as its source counts, or empty where tokens are
/// not gathered. Waits for the GPU.
ExchangePlan make_exchange_plan(DevicePool& pool, const PlanData& data,
                                std::span<const int64_t> arrival_tokens, cudaStream_t stream,
                                StreamWatch& watch);

}  // namespace crossdock::cuda
