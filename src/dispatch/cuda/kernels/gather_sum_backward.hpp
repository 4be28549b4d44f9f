#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "comm/cuda/peer_pointers.hpp"
#include "comm/cuda/peer_signals.cuh"
#include "crossdock/dtype.hpp"
#include "plan/cuda/device_plan.hpp"

namespace crossdock::cuda {

/// Backward of combine. For every route (t, k) with target row r:
/// grad_rows[r] = round(weight[t, k] * grad_out[t]), grad_weights[t, k] = <y[r], grad_out[t]> in
/// fp32, in an order that depends on D alone; 0 where there is no kept route.
struct GatherSumBackwardArgs {
  const RouteTarget* targets;  // [T, K]
  const float* weights;        // [T, K]
  int64_t T;
  int32_t K;
  int32_t D;
  DType dtype;                        // of grad_out, y and grad_rows: fp32, bf16 or fp16
  const std::byte* grad_out;          // [T, D]
  PeerPointers<const std::byte> y;    // [R, D] of every rank
  PeerPointers<std::byte> grad_rows;  // [R, D] of every rank
  float* grad_weights;                // [T, K]
  PeerSignals signals;
};

/// Collective; when it ends, all ranks are done. REQUIRES: all ranks' y are written and their
/// grad_rows may be written. If a rank has not arrived, no peer's memory is used; grad_weights are
/// zero, and so are the grad_rows of this rank's routes to itself. `sms`: SM limit; 0: none.
void load_gather_sum_backward();  // before the first launch
void launch_gather_sum_backward(const GatherSumBackwardArgs& args, int sms, cudaStream_t stream);

}  // namespace crossdock::cuda
