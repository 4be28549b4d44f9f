#pragma once

#include <cuda_runtime.h>

#include "ops/cuda/hopper/tensor_map.hpp"
#include "router/cuda/grad_x.hpp"

// The gradient of bf16 tokens from a bf16 gate on sm_90a, limited by the memory traffic of grad_x.

namespace crossdock::router::hopper {

/// Shared memory per block that this kernel and that of the gate's gradient need.
inline constexpr int kGradSharedBytes = 226 << 10;

/// Loads the kernels onto the current device. False if they were not compiled for it.
bool load_grad_x();

/// REQUIRES: args.parts; gate, grad_x and their rows are aligned
/// to 16 bytes; no jitter.
void launch_grad_x(const GradXArgs& args, ops::hopper::TensorMaps& maps, cudaStream_t stream);

}  // namespace crossdock::router::hopper
