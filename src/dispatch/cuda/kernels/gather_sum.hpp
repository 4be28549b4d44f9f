#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "comm/cuda/peer_signals.cuh"
#include "crossdock/dtype.hpp"
#include "plan/cuda/device_plan.hpp"

namespace crossdock::cuda {

/// out[t] = round(acc), acc from +0 by fma(weight[t, k], rows[row of (t, k)], acc) in fp32, k
/// ascending: the bits of the CPU.
struct GatherSumKernelArgs {
  const RouteTarget* targets;  // [T, K]
  const float* weights;        // [T, K], or null: all 1
  int64_t T;
  int32_t K;
  int32_t D;
  DType dtype;                       // fp32, bf16 or fp16
  const std::byte* rows[kMaxPeers];  // [R, D] of every rank; null where no target is
  std::byte* out;                    // [T, D]
  PeerSignals signals;
  Operation operation;  // for messages
  int num_sharing;      // ranks whose kernels of this call share the GPU
  bool awaits_peers;    // first; all ranks' blocks fit on their GPU together
};

/// Collective; all ranks have read their rows when it ends. REQUIRES: all ranks' rows are written,
/// or are at the kernel's place in their streams where it awaits them. If a rank has not arrived,
/// no rows are read and out is zero. `sms`: limit of multiprocessors; 0: none.
void load_gather_sum();  // before the first launch
void launch_gather_sum(const GatherSumKernelArgs& args, int sms, cudaStream_t stream);

}  // namespace crossdock::cuda
