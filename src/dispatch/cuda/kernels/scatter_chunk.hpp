#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "dispatch/cuda/kernels/scatter.hpp"

namespace crossdock::cuda {

/// The rows of a chunk: those of a contiguous range of each rank's local experts. Only the device
/// knows where they begin.
struct ChunkRows {
  const int32_t* segment_starts;  // [E] first row of an expert at its owner; null: all rows
  int32_t first[kMaxPeers];       // [P] expert with which the chunk begins at each rank; -1: empty
  int32_t end[kMaxPeers];         // [P] expert before which it ends; -1: past the last one
};

struct ScatterChunkArgs {
  ScatterArgs scatter;
  ChunkRows rows;
  /// One block per SM in place of small ones, which the GPU spreads over more SMs than it must: all
  /// other SMs are free for kernels whose blocks need a whole one. With an SM limit only; the
  /// blocks of all ranks must fit on their GPU together.
  bool takes_whole_sms;
};

/// As launch_scatter, for the rows of a chunk; other rows are not written. For a scatter that
/// shares the GPU with other kernels: it needs few SMs rather than little time.
void load_scatter_chunk();  // before the first launch
void launch_scatter_chunk(const ScatterChunkArgs& args, int sms, cudaStream_t stream);

}  // namespace crossdock::cuda
