#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "crossdock/dtype.hpp"
#include "router/cuda/batch_jitter.hpp"

namespace crossdock::router {

/// grad_x (+)= grad_logits gate, times the jitter. With a bf16 gate on tensor cores, as exact as in
/// fp32 (split_product.cuh); with others fp32 fma.
struct GradXArgs {
  const float* grad_logits;  // [T, E]
  const void* gate;          // [E, D]
  DType gate_dtype;          // fp32, bf16 or fp16
  BatchJitter jitter;
  int64_t T;
  int64_t E;
  int64_t D;
  bool accumulates;

  void* grad_x;   // out: [T, D]
  DType x_dtype;  // fp32, bf16 or fp16
};

void load_grad_x();
void launch_grad_x(const GradXArgs& args, cudaStream_t stream);

}  // namespace crossdock::router
