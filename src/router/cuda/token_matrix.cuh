#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "router/choice.hpp"
#include "router/cuda/fma_product.cuh"
#include "router/cuda/kernels.hpp"

namespace crossdock::router {

__device__ inline TokenJitter<float> jitter_of_token(const BatchJitter& jitter, int64_t token) {
  return {jitter.size, jitter.seed, jitter.token_ids != nullptr ? jitter.token_ids[token] : token};
}

/// Tokens x [T, D] as the gate sees them: times the jitter, zero in padding.
struct TokenMatrix {
  DeviceMatrix x;
  BatchJitter jitter;
  const int32_t* sequences;  // [T]; negative: padding; null: no token is zero

  /// Four values of a token from column d on; zero from D on. REQUIRES: d is a multiple of 4.
  __device__ void read(int64_t token, int64_t d, int64_t D, float (&out)[4]) const {
    if (sequences != nullptr && sequences[token] < 0) {
      out[0] = out[1] = out[2] = out[3] = 0.0f;
      return;
    }
    x.read(token, d, D, out);
    if (jitter.size == 0.0f) return;
    const TokenJitter<float> factors = jitter_of_token(jitter, token);
#pragma unroll
    for (int j = 0; j < 4; ++j) out[j] *= factors.factor(d + j);
  }
};

/// The gate's bias of an expert; 0 without biases.
__device__ inline float bias_of(const LogitsArgs& args, int64_t e) {
  if (args.bias == nullptr) return 0.0f;
  if (args.gate_dtype == DType::kF32) return static_cast<const float*>(args.bias)[e];
  if (args.gate_dtype == DType::kBF16) return to_float(static_cast<const BF16*>(args.bias)[e]);
  return to_float(static_cast<const F16*>(args.bias)[e]);
}

}  // namespace crossdock::router
