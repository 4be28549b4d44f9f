#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "comm/cuda/peer_pointers.hpp"
#include "comm/cuda/peer_signals.cuh"
#include "crossdock/dtype.hpp"
#include "crossdock/plan.hpp"
#include "plan/cuda/device_plan.hpp"

namespace crossdock::cuda {

/// out[t] = round(acc), acc from +0 by fma(weight[t, k], rows[row of (t, k)], acc) in fp32, k
/// ascending: bit-identical to the CPU.
struct GatherSumKernelArgs {
  const RouteTarget* targets;  // [T, K]
  const float* weights;        // [T, K], or null: all 1
  int64_t T;
  int32_t K;
  int32_t D;
  DType dtype;                         // of the rows: fp32, bf16 or fp16
  DType out_dtype;                     // dtype; or bf16 or fp16 with fp32 rows
  PeerPointers<const std::byte> rows;  // [R, D] of every rank; null if it has no target
  std::byte* out;                      // [T, D]
  /// Not kNone: acc is rounded to this, as the token's only partial sum, and added to +0.
  PartialSums whole_sum;
  PeerSignals signals;
  Operation operation;  // for messages
  int num_sharing;      // ranks whose kernels of this call share the GPU
  bool awaits_peers;    // at its start; the blocks of all ranks must fit on their GPU together
};

/// Collective; when it ends, all ranks have read their rows. REQUIRES: all ranks' rows are written
/// or, with awaits_peers, are written once their streams reach the kernel. If a rank has not
/// arrived, no rows are read and out is zero. `sms`: SM limit; 0: none.
void load_gather_sum();  // before the first launch
/// A barrier of all ranks, to launch before a gather_sum that does not wait for its peers itself.
/// Meanwhile prefetches some of this rank's rows (own_bytes in all) into the L2 cache, since memory
/// is idle: saves 1 us for 128 tokens of 14 KiB on 8 ranks.
void launch_gather_barrier(const GatherSumKernelArgs& args, int64_t own_bytes, cudaStream_t stream);
void launch_gather_sum(const GatherSumKernelArgs& args, int sms, cudaStream_t stream);

}  // namespace crossdock::cuda
