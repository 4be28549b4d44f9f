#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "comm/cuda/peer_signals.cuh"
#include "plan/cuda/device_plan.hpp"

namespace crossdock::cuda {

/// One part of every row, moved as bits.
struct ScatterPart {
  const std::byte* tokens;       // [T, row_bytes]
  PeerPointers<std::byte> rows;  // [R, row_bytes] of every rank; null if it has no target
  int64_t row_bytes;
};

struct ScatterArgs {
  const RouteTarget* targets;  // [T, K]
  int64_t T;
  int32_t K;
  int32_t num_parts;  // fp8: 2, values and scales; else 1
  ScatterPart parts[2];
  const float* weights;             // [T, K], or null: no row weights requested
  PeerPointers<float> row_weights;  // [R] of every rank
  PeerSignals signals;
  Operation operation;  // for messages
  int num_sharing;      // ranks whose kernels of this call share the GPU; 0 or 1: this one alone
  bool is_captured;     // a second kernel costs the host nothing then
  bool awaits_peers;    // at its start; the blocks of all ranks must fit on their GPU together
};

/// rows[row] of rank `rank` = tokens[t] for every route's target; when it ends, all ranks are done.
/// Collective. REQUIRES: all ranks' rows may be written or, with awaits_peers, may be written once
/// their streams reach the kernel. If a rank has not arrived, only the rows of this rank's routes
/// to itself are written, with zeros. `sms`: SM limit; 0: none.
void load_scatter();  // before the first launch
void launch_scatter(const ScatterArgs& args, int sms, cudaStream_t stream);

/// The rows of a chunk: those of a contiguous range of each rank's local experts. Only the device
/// knows where they begin.
struct ChunkRows {
  const int32_t* segment_starts;  // [E] first row of an expert at its owner; null: all rows
  int32_t first[kMaxPeers];       // [P] first expert of the chunk at each rank; -1: empty
  int32_t end[kMaxPeers];         // [P] first expert after the chunk; -1: there is none
};

struct ScatterChunkArgs {
  ScatterArgs scatter;
  ChunkRows rows;
  /// One block per SM instead of small blocks, which the GPU would spread over more SMs than
  /// necessary: the other SMs stay free for kernels whose blocks need a whole SM. Only with an SM
  /// limit; the blocks of all ranks must fit on their GPU together.
  bool takes_whole_sms;
};

/// Like launch_scatter, but writes only the rows of a chunk. For a scatter that shares the GPU with
/// other kernels: it needs few SMs rather than little time.
void load_scatter_chunk();  // before the first launch
void launch_scatter_chunk(const ScatterChunkArgs& args, int sms, cudaStream_t stream);

}  // namespace crossdock::cuda
