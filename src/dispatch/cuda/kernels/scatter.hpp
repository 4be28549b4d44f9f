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
  std::byte* rows[kMaxPeers];  // [R, row_bytes] of every rank; null if it has no target
  int64_t row_bytes;
};

/// A chunk of a dispatch: a contiguous range of each rank's local experts, and thus of its rows.
/// Only the device knows where these begin.
struct ScatterChunk {
  const int32_t* segment_starts;  // [E] first row of an expert at its owner; null: all rows
  int32_t first[kMaxPeers];       // [P] the expert with which the chunk begins at each rank
  int32_t end[kMaxPeers];         // [P] the expert before which it ends; -1: past the last expert
};

struct ScatterArgs {
  const RouteTarget* targets;  // [T, K]
  int64_t T;
  int32_t K;
  int32_t num_parts;  // fp8: 2, values and scales; else 1
  ScatterPart parts[2];
  const float* weights;           // [T, K], or null: no row weights requested
  float* row_weights[kMaxPeers];  // [R] of every rank
  ScatterChunk chunk;             // rows of other chunks are not written
  PeerSignals signals;
  Operation operation;  // for messages
  bool awaits_peers;    // at its start; the blocks of all ranks must fit on their GPU together
  /// One block per SM in place of several small ones, which the GPU spreads over more SMs than it
  /// must: all other SMs are free for kernels whose blocks need a whole one. With an SM limit only;
  /// the blocks of all ranks must fit on their GPU together.
  bool takes_whole_sms;
};

/// rows[row] of rank `rank` = tokens[t] for every route's target in the chunk; when it ends, all
/// ranks are done. Collective. REQUIRES: all ranks' rows are free to be written or, with
/// awaits_peers, are so once their streams reach the kernel. If a rank has not arrived, only the
/// rows of this rank's routes to itself are written, with zeros. `sms`: SM limit; 0: none.
void load_scatter();  // before the first launch
void launch_scatter(const ScatterArgs& args, int sms, cudaStream_t stream);

}  // namespace crossdock::cuda
