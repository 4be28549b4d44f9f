#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "crossdock/dtype.hpp"
#include "router/cuda/batch_jitter.hpp"

namespace crossdock::router {

/// Tokens are summed in slices, which depend on the shape alone; the slices' sums are added in
/// ascending order.
struct TokenSlices {
  int64_t count;
  int64_t num_tokens;  // of a slice; the last may have fewer
};
TokenSlices gate_slices(int64_t T, int64_t E, int64_t D);
TokenSlices bias_slices(int64_t T);

/// grad_gate (+)= grad_logits^T x. Without jitter, bf16 tokens run on tensor cores, as exact as in
/// fp32 (split_product.cuh); others are fp32 fma.
struct GradGateArgs {
  const float* grad_logits;  // [T, E]
  const void* x;             // [T, D]
  DType x_dtype;             // fp32, bf16 or fp16
  BatchJitter jitter;
  const int32_t* sequences;  // [T]; negative: padding, whose x is not looked at
  int64_t T;
  int64_t E;
  int64_t D;
  bool accumulates;
  TokenSlices slices;
  float* slice_sums;  // scratch, [slices.count, E, D]; not used if there is one slice

  float* grad_gate;  // out: [E, D]
};

/// grad_bias (+)= the sum of grad_logits over tokens, in fp64.
struct GradBiasArgs {
  const float* grad_logits;  // [T, E]
  int64_t T;
  int64_t E;
  bool accumulates;
  TokenSlices slices;
  double* slice_sums;  // scratch, [slices.count, E]

  float* grad_bias;  // out: [E]
};

void load_grad_gate();
void launch_grad_gate(const GradGateArgs& args, cudaStream_t stream);
/// The last step of launch_grad_gate: adds up the sums of several slices.
void launch_sum_gate(const GradGateArgs& args, cudaStream_t stream);
void launch_grad_bias(const GradBiasArgs& args, cudaStream_t stream);

}  // namespace crossdock::router
