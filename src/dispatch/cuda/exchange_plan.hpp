#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "comm/cuda/stream_watch.hpp"
#include "core/cuda/device_pool.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "crossdock/group.hpp"
#include "crossdock/plan.hpp"
#include "plan/cuda/device_plan.hpp"

namespace crossdock::cuda {

/// Traffic between this rank and every rank p, in rows: the part of this rank's send buffer that
/// goes to p, the part of its receive buffer that comes from p, and the position of the latter in
/// p's send buffer.
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

/// Takes the offsets of the parts of this rank's send and receive buffers ([P + 1] each), and of
/// its part of every other rank's send buffer ([P]).
RowTraffic make_traffic(std::span<const int64_t> send_offsets,
                        std::span<const int64_t> recv_offsets,
                        std::span<const int64_t> peer_begins);

/// The same if ranks do not know each other's buffers: every rank announces the offsets of its send
/// buffer. Collective.
RowTraffic agree_on_traffic(Group& group, const Plan& plan,
                            const std::vector<int64_t>& send_offsets,
                            const std::vector<int64_t>& recv_offsets);

/// Rows from rank `source` to rank `destination`.
int64_t rows_between(const PlanData& data, int source, int destination);

/// Data for exchanges of packed rows, from a plan made on the host: sizes on the host, index arrays
/// on the GPU.
struct ExchangePlan {
  RowTraffic out;     // tokens to experts
  RowTraffic home;    // rows to their sources
  RowTraffic tokens;  // all tokens to all ranks

  Buffer memory;                             // holds the arrays
  const int64_t* sent_routes = nullptr;      // [S] t * K + k
  const int64_t* sent_tokens = nullptr;      // [S] t
  const int64_t* arrival_rows = nullptr;     // [received] row
  const int64_t* arrival_tokens = nullptr;   // [received] among all tokens
  const RouteTarget* sum_targets = nullptr;  // [T, K] position among the sent rows
  const RouteTarget* row_targets = nullptr;  // [R] each row itself
};

/// Data for tokens relayed between nodes: one copy of a token goes to each of its gateways, which
/// store it into the final rows on their node; rows from other nodes return one by one. Sizes are
/// on the host, index arrays on the GPU.
struct RelayPlan {
  RowTraffic copies;        // tokens to gateways
  RowTraffic far_returned;  // rows to sources on other nodes

  Buffer memory;                         // holds the arrays
  const int64_t* copy_tokens = nullptr;  // [copies sent] t
  int32_t K = 0;                         // slots per token
  // The `rank` of these targets is a slot of the channel.
  const RouteTarget* near_targets = nullptr;  // [T, K] on this node
  const RouteTarget* copy_targets = nullptr;  // [copies received, K]
  const int64_t* far_rows = nullptr;          // [rows returned] row here
  const RouteTarget* sum_targets = nullptr;   // [T, K]; slot after the last: returned rows
};

/// arrival_tokens: token of each arrival, numbered as on its source; empty if tokens are not
/// gathered. Waits for the GPU.
ExchangePlan make_exchange_plan(DevicePool& pool, const PlanData& data,
                                std::span<const int64_t> arrival_tokens, cudaStream_t stream,
                                StreamWatch& watch);

}  // namespace crossdock::cuda
