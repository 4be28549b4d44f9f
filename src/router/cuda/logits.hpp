#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "crossdock/dtype.hpp"
#include "ops/cuda/hopper/tensor_map.hpp"
#include "router/cuda/batch_jitter.hpp"

namespace crossdock::router {

/// logits = x gate^T + bias.
///
/// Tensor cores multiply bf16 tokens with a bf16 gate, or fp16 with fp16, unless there is jitter;
/// all else is fp32 fma with the bits of the CPU (ops::gemm). The choice depends on types and
/// configuration alone, so that a token's logits depend on that token alone.
struct LogitsArgs {
  const void* x;     // [T, D]
  DType x_dtype;     // fp32, bf16 or fp16
  const void* gate;  // [E, D]
  const void* bias;  // [E] in gate_dtype, or null
  DType gate_dtype;  // fp32, bf16 or fp16
  BatchJitter jitter;
  int64_t T;
  int64_t E;
  int64_t D;

  float* logits;               // out: [T, E]
  unsigned long long* counts;  // out: [num_counts] zero, for launch_choose
  int64_t num_counts;
};

/// Loads the kernels onto the current device.
void load_logits();

/// maps: where sm_90a kernels can run, else null.
void launch_logits(const LogitsArgs& args, ops::hopper::TensorMaps* maps, cudaStream_t stream);

}  // namespace crossdock::router
