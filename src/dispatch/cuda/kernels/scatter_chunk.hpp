#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "dispatch/cuda/kernels/scatter.hpp"

namespace crossdock::cuda {

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
