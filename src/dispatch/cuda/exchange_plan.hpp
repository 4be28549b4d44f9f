#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "comm/cuda/stream_watch.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/device_pool.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "crossdock/group.hpp"
#include "crossdock/plan.hpp"
#include "dispatch/cuda/cuda_rank.hpp"
#include "dispatch/cuda/kernels/gather_sum.hpp"
#include "dispatch/host/wire.hpp"
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

/// Arrays packed into one block of device memory, each aligned to 16 bytes.
class PackedArrays {
 public:
  /// upload will set `place` to the array's address.
  template <typename T>
  void add(const std::vector<T>& values, const T*& place) {
    const size_t offset = bytes_.size();
    bytes_.resize((offset + values.size() * sizeof(T) + 15) / 16 * 16);
    if (!values.empty()) {
      std::memcpy(bytes_.data() + offset, values.data(), values.size() * sizeof(T));
    }
    settings_.push_back([offset, &place](const std::byte* memory) {
      place = reinterpret_cast<const T*>(memory + offset);
    });
  }

  /// Waits for the device, at most as long as the watch allows.
  Buffer upload(DevicePool& pool, cudaStream_t stream, StreamWatch& watch) const {
    Buffer memory = pool.take(std::ssize(bytes_), stream);
    if (!bytes_.empty()) {
      CROSSDOCK_CUDA(cudaMemcpyAsync(memory.data(), bytes_.data(), bytes_.size(),
                                     cudaMemcpyHostToDevice, stream));
      watch.await(stream);
    }
    for (const auto& set_place : settings_) set_place(memory.data());
    return memory;
  }

 private:
  std::vector<std::byte> bytes_;
  std::vector<std::function<void(const std::byte* memory)>> settings_;
};

/// Sums for launch_sum_groups: sum n has the terms [offsets[n], offsets[n + 1]).
struct SumList {
  std::vector<SumTerm> terms;
  std::vector<int64_t> offsets{0};

  /// Ends the current sum.
  void end_sum() { offsets.push_back(std::ssize(terms)); }
};

/// How a plan's rows are summed with partial sums. Every rank makes the sums `sent`, one partial
/// row each, ordered by the rank that they go to. A source makes the sums `tokens` of the partial
/// rows that arrive there, in the order of the ranks they come from, and of rows that it reads in
/// place.
struct PartialSumLists {
  SumList sent;
  std::vector<int64_t> send_offsets;  // [P + 1] into the sums of `sent`
  std::vector<int64_t> recv_offsets;  // [P + 1] into the partial rows that arrive
  SumList tokens;                     // [T]
  int32_t arrived_source = 0;         // source of the arrived rows in `tokens`; -1: none arrive
};

/// The sums that a rank makes of its own rows, as RankSums lists them; `offsets` [sums + 1] into
/// RankSums::rows. REQUIRES: the weights are fp32.
SumList sums_at_experts(const RankSums& sums, std::vector<int64_t> offsets);

/// The lists on the GPU, and sizes on the host.
struct PartialSumPlan {
  struct List {
    const SumTerm* terms = nullptr;
    const int64_t* offsets = nullptr;  // [num_sums + 1]
    int64_t num_sums = 0;
  };

  RowTraffic traffic;  // partial rows to their sources
  Buffer memory;       // holds the lists
  List sent;
  List tokens;
  int32_t arrived_source = 0;
};

/// Collective; waits for the GPU.
PartialSumPlan make_partial_sum_plan(CudaRank& rank, const Plan& plan,
                                     const PartialSumLists& lists);

}  // namespace crossdock::cuda
