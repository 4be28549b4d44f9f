#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "comm/cuda/peer_signals.cuh"
#include "plan/cuda/device_plan.hpp"

namespace crossdock::cuda {

/// From one fp32 number per row to one per route.
struct GatherRoutesArgs {
  const RouteTarget* targets;      // [T, K]
  int64_t num_routes;              // T * K
  PeerPointers<const float> rows;  // [R] of every rank
  float* routes;                   // [T, K]
  PeerSignals signals;
};

/// routes[t, k] = rows[target of (t, k)], or 0 if there is no target or a rank has not arrived.
/// Collective, like launch_gather_sum.
void load_gather_routes();  // before the first launch
void launch_gather_routes(const GatherRoutesArgs& args, cudaStream_t stream);

/// Zeroes this rank's pad rows, which alignment and pad_to_capacity leave between routes' rows.
struct PadRowsArgs {
  DevicePlan plan;
  PlanShape shape;
  int32_t P;
  int32_t rank;
  int32_t num_local;  // E_local
  std::byte* rows;    // [R, row_bytes]
  int64_t row_bytes;
};

void load_pad_rows();  // before the first launch
void launch_pad_rows(const PadRowsArgs& args, cudaStream_t stream);

/// to[to_index[i]] = from[from_index[i]] for every i, as bits; a null index means i. No row is
/// written twice. Rows of a peer that has not arrived are not read, but replaced by zeros.
struct MoveRowsArgs {
  const std::byte* from;  // [any, row_bytes]
  const int64_t* from_index;
  std::byte* to;  // [any, row_bytes]
  const int64_t* to_index;
  int64_t num_rows;
  int64_t row_bytes;
  const SignalState* signals = nullptr;  // of this rank, if `from` is a peer's
};

void load_move_rows();  // before the first launch
void launch_move_rows(const MoveRowsArgs& args, cudaStream_t stream);

}  // namespace crossdock::cuda
