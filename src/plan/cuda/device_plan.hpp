#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <limits>

#include "comm/cuda/peer_calls.cuh"
#include "comm/cuda/peer_signals.cuh"
#include "crossdock/dtype.hpp"

// The plan on the device: written by plan.cu, read by the kernels that move rows. Counts and rows
// are 32-bit (a rank has fewer than 2^31 rows), byte offsets are 64-bit.

namespace crossdock::cuda {

/// Where a route ends: row `row` of rank `rank`; both -1 for a slot without a kept route.
struct RouteTarget {
  int32_t rank;
  int32_t row;
};

/// Tells a row's owner which other rows here belong to the same token. All zero for a pad row.
struct alignas(8) RowLink {
  uint32_t bits;  // kFirst if the row has the token's lowest slot here; the next row plus 1, or 0
  float weight;   // of the route

  static constexpr uint32_t kFirst = uint32_t{1} << 31;

  __host__ __device__ bool is_first() const { return (bits & kFirst) != 0; }
  /// The row here with the token's next slot; -1: there is none.
  __host__ __device__ int32_t next() const { return static_cast<int32_t>(bits & ~kFirst) - 1; }
};

/// Device memory of a plan that lets ranks send one row per token and rank; see link_rows.hpp.
struct PlanLinks {
  RowLink* rows = nullptr;              // [R] rows here, linked by token; written by all ranks
  int64_t num_rows = 0;                 // R
  RouteTarget* rank_targets = nullptr;  // [T, K] the ranks of a token, ascending, each with the row
                                        // of its lowest slot there; then {-1, -1}
};

/// Device memory of one plan, all of it written by the plan kernels. A plan that was refused is
/// empty: no route has a target, all counts are 0.
struct DevicePlan {
  RouteTarget* targets;     // [T, K]
  float* weights;           // [T, K] fp32; 0 where there is no kept route
  int32_t* counts;          // [P, E] kept routes of source rank s to expert e
  int32_t* segment_starts;  // [E] first row of expert e at its owner
  int64_t* local_starts;    // [E_local + 1] Segments::starts
  int64_t* local_counts;    // [E_local] Segments::counts
  int64_t* rows_per_rank;   // [P] rows at every rank, pad rows included
  int64_t* dropped;         // [E] routes of this rank that capacity dropped
};

/// Identical on every rank: the shape of a plan, and who owns which expert.
struct PlanShape {
  int32_t K;                     // slots per token
  int32_t E;                     // experts in all
  int32_t alignment;             // of segments
  int64_t capacity;              // C, or kNoCapacity
  bool pad_to_capacity;          // every segment has C rows per source
  bool keep_empty_segments;      // every segment has at least one row
  bool reject_nonfinite;         // weights
  int64_t max_rows;              // at any rank
  const int32_t* owner;          // [E] expert -> rank
  const int32_t* by_owner;       // [E] experts by (owner, expert)
  const int32_t* owner_offsets;  // [P + 1] into by_owner

  static constexpr int64_t kNoCapacity = std::numeric_limits<int32_t>::max();
  static constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();
};

/// One rank's routing.
struct DeviceRouting {
  const void* expert_ids;  // [T, K] int32 or int64
  bool ids_are_64_bit;
  bool ids_are_distinct;  // within each token: no check is needed
  const float* weights;   // [T, K]
  const bool* mask;       // [T] true = padding; may be null
  int64_t T;
};

/// How many blocks and warps count a rank's routes. num_sharing: ranks that share the GPU.
struct PlanShares {
  int32_t num_blocks;
  int32_t num_warps;    // of a block
  int64_t warp_tokens;  // tokens that a warp counts
  bool is_small;        // one block also places the routes
};
PlanShares plan_shares(int64_t T, int32_t K, int32_t E, int num_sharing);

/// Scratch memory, free again when the plan kernels have ended.
struct PlanScratch {
  int32_t* warp_sums;   // [all warps, E] routes to e that earlier warps of the block counted
  int32_t* block_sums;  // [blocks, E] routes to e that earlier blocks counted
  int32_t* route_base;  // [E] row at the owner of this rank's first route to e; -1: refused

  static int64_t num_words(const PlanShares& shares, int64_t E) {
    return (int64_t{shares.num_blocks} * (shares.num_warps + 1) + 1) * E;
  }
  static PlanScratch carve(int32_t* memory, const PlanShares& shares, int64_t E) {
    int32_t* block_sums = memory + int64_t{shares.num_blocks} * shares.num_warps * E;
    return {memory, block_sums, block_sums + shares.num_blocks * E};
  }
};

struct PlanArgs {
  DeviceRouting routing;
  PlanShape shape;
  DevicePlan plan;
  PlanShares shares;
  PlanScratch scratch;
  PeerSignals signals;  // of this rank; max_words is at least plan_words(E)
  QueuedCall call;      // if it has a number, a refused plan also halts the channel
  int num_sharing;      // ranks whose kernels of this call share the GPU
};

/// Words that a rank sends to each peer.
int64_t plan_words(int64_t E);
/// Collective. Counts, exchanges counts with all ranks and places every route. A bad routing on any
/// rank, or more rows than max_rows anywhere, is recorded as the same fault on all ranks.
/// REQUIRES: fits_device_plan.
void load_plan(int64_t shared_memory);  // before the first launch; bytes per block
void launch_plan(const PlanArgs& args, cudaStream_t stream);

// Convert a routing to the form that the plan kernels take: int32 ids and fp32 weights by slot.
// These kernels do not wait for peers.

/// A dense map, and the slots that are made from it.
struct MapSlotsArgs {
  const uint8_t* map;   // [T, E] bool
  const void* weights;  // [T, E]
  DType weight_dtype;   // fp64, fp32, bf16 or fp16
  const bool* mask;     // [T] true = padding; may be null
  int64_t T;
  int32_t E;
  int32_t K;
  int32_t* expert_ids;  // out: [T, K] set bits in ascending order, then -1
  float* slot_weights;  // out: [T, K]; 0 where there is no route
  uint64_t* bad_route;  // SignalState::bad_route, for tokens with more than K set bits
};

void load_route_slots();  // before the first launch

/// Records the lowest token with more than K set bits as kTooManyRoutes; its first id is then the
/// number of bits.
void launch_map_slots(const MapSlotsArgs& args, cudaStream_t stream);

/// Sets *most to the largest number of set bits in a token that is not masked.
void launch_most_bits(const uint8_t* map, const bool* mask, int64_t T, int32_t E, int32_t* most,
                      cudaStream_t stream);

/// Rounds fp64, bf16 or fp16 weights to fp32.
void launch_round_weights(const void* from, DType dtype, int64_t count, float* to,
                          cudaStream_t stream);

}  // namespace crossdock::cuda
