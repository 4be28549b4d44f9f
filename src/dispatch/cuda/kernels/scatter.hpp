#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "comm/cuda/peer_signals.cuh"
#include "plan/cuda/device_plan.hpp"

namespace crossdock::cuda {

/// One part of every row, moved as bits.
struct ScatterPart {
  const std::byte* tokens;     // [T, row_bytes]
  std::byte* rows[kMaxPeers];  // [R, row_bytes] of every rank; null where no target is
  int64_t row_bytes;
};

struct ScatterArgs {
  const RouteTarget* targets;  // [T, K]
  int64_t T;
  int32_t K;
  int32_t num_parts;  // fp8: 2, values and scales; else 1
  ScatterPart parts[2];
  const float* weights;           // [T, K], or null: no row weights wanted
  float* row_weights[kMaxPeers];  // [R] of every rank
  PeerSignals signals;
  Operation operation;  // for messages
  bool awaits_peers;    // first; all ranks' blocks fit on their GPU together
};

/// rows[row] of rank `rank` = tokens[t] for every route's target; all ranks are done when it ends.
/// Collective. REQUIRES: all ranks' rows are free to be written, or are so at the kernel's place in
/// their streams where it awaits them. If a rank has not arrived, nothing is written but zeros to
/// the rows that this rank owes itself. `sms`: limit of multiprocessors; 0: none.
void load_scatter();  // before the first launch
void launch_scatter(const ScatterArgs& args, int sms, cudaStream_t stream);

}  // namespace crossdock::cuda
