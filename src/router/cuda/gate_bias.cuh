#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "router/cuda/logits.hpp"

namespace crossdock::router {

/// The gate's bias of an expert; 0 without biases.
__device__ inline float bias_of(const LogitsArgs& args, int64_t e) {
  if (args.bias == nullptr) return 0.0f;
  if (args.gate_dtype == DType::kF32) return static_cast<const float*>(args.bias)[e];
  if (args.gate_dtype == DType::kBF16) return to_float(static_cast<const BF16*>(args.bias)[e]);
  return to_float(static_cast<const F16*>(args.bias)[e]);
}

}  // namespace crossdock::router
