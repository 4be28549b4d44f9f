#pragma once

#include <cuda_runtime.h>

#include "ops/cuda/hopper/tensor_map.hpp"
#include "router/cuda/kernels.hpp"

// Logits of 16-bit tokens and gates on sm_90a, limited by the memory traffic of x.

namespace crossdock::router::hopper {

/// Loads the kernels onto the current device. False if they were not compiled for it.
bool load_logits();

/// Whether the kernels take these arguments on the current device. REQUIRES: x and gate are both
/// bf16 or both fp16, without jitter.
bool takes(const LogitsArgs& args);

void launch_logits(const LogitsArgs& args, ops::hopper::TensorMaps& maps, cudaStream_t stream);

}  // namespace crossdock::router::hopper
